"""The SHA-256 of a file's content, computed once per process for as long as the file does not change."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

_CHUNK = 1 << 20
# A file newer than this may change again without a new time: clocks of file systems tick in up to 2 s (FAT).
_TICK = 2_000_000_000
State = tuple[str, int, int, int, int]
_digests: dict[State, str] = {}


def digest_of_file(path: Path) -> str:
    """Return the SHA-256 of the file's content in hexadecimal."""
    state = settled_state(path)
    if state is not None and state in _digests:
        return _digests[state]
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    if state is not None:
        _digests[state] = digest.hexdigest()
    return digest.hexdigest()


def settled_state(path: Path) -> State | None:
    """Return what changes when the file is written to; None for a file so new that this may not show."""
    status = os.stat(path)
    settled = time.time_ns() - max(status.st_mtime_ns, status.st_ctime_ns) > _TICK
    state = (str(path.resolve()), status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    return state if settled else None
