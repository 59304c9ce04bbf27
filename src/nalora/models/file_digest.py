"""A file's content as a short name: SHA-256, read once in a process for as long as the file stays as it is."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

_CHUNK = 1 << 20
# A file as new as this can change once more without a trace: clocks of file systems tick in up to 2 s (FAT).
_TICK = 2_000_000_000
_digests: dict[tuple[str, int, int, int, int], str] = {}


def digest_of_file(path: Path) -> str:
    """By content, which is read once in this process for as long as the file stays as it is."""
    found = os.stat(path)
    state = (str(path.resolve()), found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
    if state in _digests:
        return _digests[state]
    settled = time.time_ns() - max(found.st_mtime_ns, found.st_ctime_ns) > _TICK
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    if settled:
        _digests[state] = digest.hexdigest()
    return digest.hexdigest()
