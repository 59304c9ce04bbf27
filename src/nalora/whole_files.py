"""Files that are there whole or not at all: written beside their place, then moved there in one step."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save as to_bytes
from torch import Tensor


def write(path: Path, content: bytes | str) -> None:
    """Write a file; a kill, or a disk that is full, leaves the one that was there before."""
    # The process's own: two that write the same file do not write into each other's.
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with partial.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write tensors from any device as a safetensors file."""
    write(path, to_bytes({name: each.cpu().contiguous() for name, each in tensors.items()}, metadata))
