"""Read and write files: each is complete or missing, and files that nalora did not write are never replaced."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return the folder for data that can be recomputed (NALORA_CACHE, else ~/.cache/nalora); it need not exist."""
    return expanded(os.environ.get("NALORA_CACHE", "~/.cache/nalora"))


def expanded(path: str | os.PathLike[str]) -> Path:
    """Return a path with ~ and ~user replaced by home directories; that of an unknown user is kept as it is."""
    # Path.expanduser raises RuntimeError for it, although a file may well be called "~0".
    try:
        return Path(os.path.expanduser(path))
    except UnicodeEncodeError:  # a name with a lone surrogate, which no user has
        return Path(path)
