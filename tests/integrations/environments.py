"""Environments of other people's trainers, at their own pins, for the slow tests: built once, in a cache folder.

torch is the CPU build that constraints.txt pins. torchvision and torchaudio exist for CUDA builds only next to it: no
test needs the first, and the second, which LLaMA-Factory imports, loads without its compiled part.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import Distribution, distributions
from pathlib import Path

import pytest
import wheels
from filelock import FileLock

ROOT = Path(__file__).parents[2]
CACHE = Path(os.environ.get("TRAINER_ENVIRONMENTS", "~/.cache/nalora-test-environments")).expanduser()
PACKAGES = {
    "llamafactory": ["llamafactory==0.9.5", "transformers==5.6.0", "peft==0.18.1", "trl==0.24.0", "accelerate==1.11.0"],
    "swift": ["ms-swift==4.6.0", "transformers==5.19.0", "peft==0.20.0", "trl==0.29.1", "accelerate==1.15.0"],
    # It asks for Python 3.12 and runs with 3.11, for which there is a CPU build of torch.
    "axolotl": ["axolotl==0.21.0", "transformers==5.20.1", "peft==0.21.2", "trl==1.14.1", "accelerate==1.15.0"],
}
# Of Axolotl's requirements: needed for GPUs, clouds, evaluation or its web page, and not imported by its training.
_LEFT_OUT = [
    "xformers", "gradio", "lm_eval", "s3fs", "gcsfs", "adlfs", "ocifs", "trackio", "openenv-core", "tensorboard",
    "fla-core", "flash-linear-attention", "optimum", "antlr4-python3-runtime", "langdetect", "immutabledict",
]  # fmt: skip


def python_of(name: str) -> Path:
    """The Python of a trainer's environment, which is built if it is not there, with this nalora installed."""
    if sys.version_info[:2] != (3, 11):
        pytest.skip("the environments are pinned for Python 3.11")
    content = f"{PACKAGES[name]}{_LEFT_OUT}{(ROOT / 'constraints.txt').read_text()}"
    folder = CACHE / f"{name}-{hashlib.sha256(content.encode()).hexdigest()[:8]}"
    CACHE.mkdir(parents=True, exist_ok=True)
    python = folder / "bin" / "python"
    with FileLock(f"{folder}.lock"):
        if not (folder / "complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            subprocess.run([sys.executable, "-m", "venv", folder], check=True)
            _build(name, python)
            (folder / "complete").touch()
        _install_nalora(python)
    return python


def _pip(python: Path, *arguments: object) -> None:
    constraints = ["--constraint", ROOT / "constraints.txt"] if arguments[0] == "install" else []
    subprocess.run([python, "-m", "pip", "--quiet", *arguments, *constraints], check=True)


def _build(name: str, python: Path) -> None:
    _pip(python, "install", "torch")
    package, *pins = PACKAGES[name]
    if name == "axolotl":
        _pip(python, "install", "--no-deps", "--ignore-requires-python", package)
        requirements = _distribution(python, "axolotl").requires or []
        named = [line.partition(";")[0] for line in requirements if "extra ==" not in line]
        _pip(python, "install", *pins, *(each for each in named if re.split(r"[<>=!~ ]", each)[0] not in _LEFT_OUT))
    else:
        _pip(python, "install", package, *pins)
        _pip(python, "uninstall", "--yes", "torchvision")
        for library in python.parents[1].glob("lib/*/site-packages/torchaudio/lib/*.so"):
            library.unlink()


def _distribution(python: Path, name: str) -> Distribution:
    (site_packages,) = python.parents[1].glob("lib/python*/site-packages")
    (found,) = distributions(name=name, path=[str(site_packages)])
    return found


def _install_nalora(python: Path) -> None:
    """From a copy: an installation from the working tree writes into it."""
    with tempfile.TemporaryDirectory() as folder:
        source = wheels.copy_source(Path(folder) / "source")
        _pip(python, "install", "--no-deps", "--force-reinstall", source)
