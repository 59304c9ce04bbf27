"""Read and write files: each is complete or missing, and files that nalora did not write are never replaced."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return the folder for data that can be recomputed (NALORA_CACHE, else ~/.cache/nalora); it need not exist."""
    return Path(os.environ.get("NALORA_CACHE", "~/.cache/nalora")).expanduser()
