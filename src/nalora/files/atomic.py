"""Atomic writes: a file is written under a temporary name next to its path, then renamed in one step."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

# Files and folders that this process created: a start that fails removes these and nothing else.
_CREATED: set[str] = set()


def note_created(path: Path) -> None:
    """Record that this process created the file or folder."""
    _CREATED.add(os.path.abspath(path))


def created_here(path: Path) -> bool:
    """Return whether this process created the path, even if the file was replaced since."""
    return os.path.abspath(path) in _CREATED


def write(path: Path, content: bytes | str) -> None:
    """Write a file; after a kill, or when the disk is full, the previous file is still there."""
    is_new = not os.path.lexists(path)
    partial, descriptor = _temporary_file(path)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        if is_new:
            note_created(path)
    finally:
        partial.unlink(missing_ok=True)


def _temporary_file(path: Path) -> tuple[Path, int]:
    """Create a file next to `path` that did not exist before; return its path and an open descriptor."""
    # The process id keeps two processes that write the same file from writing into one temporary file.
    names = (f".{path.name}.{os.getpid()}{f'.{attempt}' if attempt else ''}" for attempt in itertools.count())
    while True:
        partial = path.with_name(next(names))
        with contextlib.suppress(FileExistsError):
            return partial, os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_BINARY", 0), 0o666)


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the object in a JSON file; None if the file is missing, damaged or holds anything else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def sync(path: Path) -> None:
    """Flush a file, or a folder's list of files, to the disk."""
    if os.name == "nt" and path.is_dir():
        return  # Windows opens no folders
    descriptor = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write tensors from any device as a safetensors file."""
    from safetensors.torch import save as to_bytes

    write(path, to_bytes({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, metadata))


def json_text(value: Any, *, compact: bool = False, **options: Any) -> str:
    """Return valid JSON: numbers that are not finite become null; tensors and numpy values become lists and numbers.

    Python writes NaN and Infinity for such numbers, which JavaScript, jq and pandas refuse.

    Args:
        value: mappings, lists, strings and numbers.
        compact: write no spaces after commas and colons.
        options: other arguments of `json.dumps`, such as `indent`, `sort_keys` and `default`.

    Raises:
        TypeError: a value that JSON cannot represent, and no `default` for it.
    """
    options |= {"separators": (",", ":") if compact else None, "allow_nan": False}
    try:
        text = json.dumps(value, ensure_ascii=False, **options)
    except (TypeError, ValueError):
        value = _plain(value)
        text = json.dumps(value, ensure_ascii=False, **options)
    try:
        text.encode()
    except UnicodeEncodeError:  # a model can generate half of a surrogate pair; escaped, it can be written as UTF-8
        return json.dumps(value, **options)
    return text


def _plain(value: Any) -> Any:
    """Return the value with null for numbers that are not finite, and with Python's own lists and numbers."""
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key.item() if hasattr(key, "item") else key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return _plain(value.tolist()) if hasattr(value, "tolist") else value
