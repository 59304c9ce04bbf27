"""Files that are there whole or not at all: written beside their place, then moved there in one step."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

# Files and folders that this process created: a start that fails removes these and nothing else.
_CREATED: set[str] = set()


def note_created(path: Path) -> None:
    """Remember that this process created it."""
    _CREATED.add(os.path.abspath(path))


def created_here(path: Path) -> bool:
    """Whether this process created it; a file that somebody put in its place later counts too."""
    return os.path.abspath(path) in _CREATED


def write(path: Path, content: bytes | str) -> None:
    """Write a file; a kill, or a disk that is full, leaves the one that was there before."""
    is_new = not os.path.lexists(path)
    partial, descriptor = _new_file_beside(path)
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


def _new_file_beside(path: Path) -> tuple[Path, int]:
    """A temporary file that did not exist before, whoever owns the names next to `path`; opened for writing."""
    for attempt in itertools.count():
        # The process's own: two that write the same file do not write into each other's.
        partial = path.with_name(f".{path.name}.{os.getpid()}{f'.{attempt}' if attempt else ''}")
        with contextlib.suppress(FileExistsError):
            return partial, os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_BINARY", 0), 0o666)
    raise AssertionError("unreachable: the counter does not end")


def sync(path: Path) -> None:
    """Have a file, or a folder's list of files, on the disk before this returns."""
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

    write(path, to_bytes({name: each.cpu().contiguous() for name, each in tensors.items()}, metadata))


def json_text(
    value: Any,
    *,
    indent: int | None = None,
    compact: bool = False,
    sort_keys: bool = False,
    default: Callable[[Any], Any] | None = None,
) -> str:
    """JSON that every reader accepts: numbers that are not finite become null.

    Python writes NaN and Infinity for them, which are not JSON: JavaScript, jq and pandas refuse such a file. Tensors
    and numpy's arrays and scalars are written as plain lists and numbers.

    Args:
        value: mappings, lists, texts and numbers.
        indent: spaces for each level; None writes one line.
        compact: no spaces after commas and colons.
        sort_keys: mappings in the order of their keys.
        default: what is written for a value that JSON has no form for; without it that is an error.

    Raises:
        TypeError: a value that JSON has no form for.
    """
    dumped = functools.partial(
        json.dumps,
        indent=indent,
        separators=(",", ":") if compact else None,
        sort_keys=sort_keys,
        default=default,
        allow_nan=False,
    )

    try:
        text = dumped(value, ensure_ascii=False)
    except (TypeError, ValueError):
        value = _plain(value)
        text = dumped(value, ensure_ascii=False)
    # A model can write half of a surrogate pair, which UTF-8 cannot encode; escaped, it can be written.
    return text if text.isascii() or _encodes(text) else dumped(value, ensure_ascii=True)


def _plain(value: Any) -> Any:
    """The value with null for what is not finite, and with Python's own lists and numbers."""
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key.item() if hasattr(key, "item") else key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return _plain(value.tolist()) if hasattr(value, "tolist") else value


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
