"""Where nalora keeps what can be made again: NALORA_CACHE, else ~/.cache/nalora."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """The folder, which need not exist yet; read from the environment at every call."""
    return Path(os.environ.get("NALORA_CACHE", "~/.cache/nalora")).expanduser()
