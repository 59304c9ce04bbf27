"""The package as pip makes it, of a copy: pip writes into the folder that it builds."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def copy_source(folder: Path) -> Path:
    """Copy what the package is built from into a folder, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    return folder


def build(folder: Path) -> Path:
    """Return the path of a wheel that is built in a folder, with the tests' own setuptools."""
    source = copy_source(folder / "source")
    command = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, source]
    subprocess.run([sys.executable, "-m", "pip", *map(str, command)], check=True, capture_output=True, text=True)
    (wheel,) = folder.glob("nalora-*.whl")
    return wheel
