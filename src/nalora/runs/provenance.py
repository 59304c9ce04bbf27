"""What a run was made with: versions, hardware, source commit and working directory, for environment.json."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

# For copies of the source without its git folder, such as an image or a cluster's working folder.
COMMIT_VARIABLE = "NALORA_COMMIT"
WORKING_DIRECTORY = "working_directory"
_PACKAGES = ("nalora", "torch", "transformers", "peft", "accelerate", "triton", "bitsandbytes", "liger-kernel")


def environment(folder: Path) -> dict[str, Any]:
    """Return the content of environment.json for a run in `folder`."""
    import torch

    versions = {}
    for package in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    cuda = torch.cuda.is_available()
    try:  # relative, so that the paths stay right when the whole project is moved
        working_directory = os.path.relpath(Path.cwd(), folder.resolve())
    except ValueError:  # on another drive of Windows
        working_directory = str(Path.cwd())
    return {
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "commit": commit(),
        "python": platform.python_version(),
        "versions": versions,
        "device": torch.cuda.get_device_name() if cuda else platform.machine(),
        "devices": torch.cuda.device_count() if cuda else 0,
        "cpu_threads": torch.get_num_threads(),
        WORKING_DIRECTORY: working_directory,
    }


@functools.cache
def commit() -> str | None:
    """Return the commit of nalora's source, with ``+changes`` if files differ from it; None for an installed wheel."""
    if named := os.environ.get(COMMIT_VARIABLE):
        return named
    source = Path(__file__).resolve().parents[1]
    # A wheel that is installed below another repository is not part of that repository.
    if _git(source, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    changed = _git(source, "status", "--porcelain", "--untracked-files=no", "--", str(source))
    return f"{_git(source, 'rev-parse', 'HEAD')}{'+changes' if changed else ''}"


def _git(folder: Path, *arguments: str) -> str | None:
    """Return what git prints; None without git or a repository."""
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
