"""A run's checkpoints on disk: which are complete, which is the latest, which may be removed.

A checkpoint is a folder that transformers' Trainer writes. nalora writes a file into it before the Trainer (BEGUN) and
another one after it (COMPLETE), which lists every file's size and checksum. So a folder without BEGUN is not nalora's,
one without COMPLETE was being written when the run was killed, and one whose files differ was damaged later.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open

from nalora.files import atomic

BEGUN = ".nalora-checkpoint.json"
COMPLETE = "complete"
# Two, so that one is left if the other turns out to be damaged.
KEPT = 2
_NAME = re.compile(r"checkpoint-(\d+)")
_CHUNK = 2**22
_OF_TRAINER = "trainer_state.json"


def step_in(name: str) -> int | None:
    """Return the step in a checkpoint's folder name; None for any other name."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def listed(place: Path) -> list[Path]:
    """Return the folders in `place` that are named as checkpoints, ordered by step; no symbolic links."""
    if place.is_symlink() or not place.is_dir():
        return []
    steps = {path: step for path in place.iterdir() if (step := step_in(path.name)) is not None}
    return sorted((path for path in steps if path.is_dir() and not path.is_symlink()), key=lambda path: steps[path])


def is_own(checkpoint: Path) -> bool:
    """Return whether nalora wrote it; version 0.1 wrote its mark only at the end."""
    return (checkpoint / BEGUN).is_file() or (
        (checkpoint / COMPLETE).is_file() and (checkpoint / _OF_TRAINER).is_file()
    )


def own(place: Path) -> Iterator[Path]:
    """Return the checkpoints that nalora wrote, complete or not."""
    return (checkpoint for checkpoint in listed(place) if is_own(checkpoint))


def marked_complete(place: Path) -> list[Path]:
    """Return the checkpoints that were written completely."""
    return [checkpoint for checkpoint in own(place) if (checkpoint / COMPLETE).is_file()]


def latest(place: Path, before: float = math.inf, notify: Callable[[str], None] = lambda line: None) -> Path | None:
    """Return the last undamaged checkpoint of a step below `before`; `notify` gets a line for each damaged one."""
    for checkpoint in reversed(marked_complete(place)):
        if (step_in(checkpoint.name) or 0) >= before:
            continue
        if (problem := damage(checkpoint)) is None:
            return checkpoint
        notify(f"{checkpoint.name} is damaged ({problem}); the checkpoint before it is used")
    return None


def damage(checkpoint: Path) -> str | None:
    """Return what is wrong with a checkpoint that is marked complete; None if nothing is."""
    try:
        text = (checkpoint / COMPLETE).read_text(encoding="utf-8")
        record = json.loads(text) if text else {"files": {}}
        sizes: dict[str, int] = record["files"]
        checksums: dict[str, int] = record.get("crc32", {})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{COMPLETE} cannot be read"
    for name, size in sizes.items():
        file = checkpoint / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size:,} bytes of {size:,}"
        if name in checksums and _checksum(file) != checksums[name]:
            return f"{name} has different content than was written"
    # Version 0.1 recorded no sizes; a disk may also return a file of the right size without its content.
    return next((f"{file.name} is cut short" for file in _files(checkpoint) if not _is_whole(file)), None)


def begin(checkpoint: Path) -> None:
    """Create the folder, empty and marked as nalora's; raise FileExistsError if anything else has its name."""
    if is_own(checkpoint):
        shutil.rmtree(checkpoint)  # of the same step, from before the run was resumed
    checkpoint.mkdir(parents=True)
    atomic.note_created(checkpoint)
    atomic.write(checkpoint / BEGUN, atomic.json_text({"format": 1}) + "\n")


def is_free(checkpoint: Path) -> bool:
    """Return whether a checkpoint may be written there: the name is free, or an earlier one of nalora's has it."""
    return not checkpoint.is_symlink() and (not checkpoint.exists() or is_own(checkpoint))


def complete(checkpoint: Path) -> None:
    """Sync every file to disk, then mark the checkpoint as complete."""
    sizes, checksums = {}, {}
    for file in _files(checkpoint):
        atomic.sync(file)
        name = file.relative_to(checkpoint).as_posix()
        sizes[name], checksums[name] = file.stat().st_size, _checksum(file)
    for folder in sorted({file.parent for file in _files(checkpoint)} | {checkpoint}):
        atomic.sync(folder)
    atomic.write(checkpoint / COMPLETE, atomic.json_text({"format": 1, "files": sizes, "crc32": checksums}) + "\n")
    atomic.sync(checkpoint)
    atomic.sync(checkpoint.parent)


def rotate(place: Path) -> None:
    """Remove all but the last undamaged checkpoints; never a folder that nalora did not write."""
    undamaged = [checkpoint for checkpoint in marked_complete(place) if damage(checkpoint) is None]
    for old in undamaged[:-KEPT]:
        # The mark first: a half-removed checkpoint is not complete.
        (old / COMPLETE).unlink()
        shutil.rmtree(old)


def remove_unfinished(place: Path) -> None:
    """Remove checkpoints that nalora began and did not complete."""
    for checkpoint in own(place):
        if not (checkpoint / COMPLETE).is_file():
            shutil.rmtree(checkpoint)


def _files(checkpoint: Path) -> list[Path]:
    """Return all files of a checkpoint except its two marks, sharded states in subfolders included."""
    marks = (checkpoint / COMPLETE, checkpoint / BEGUN)
    return sorted(file for file in checkpoint.rglob("*") if file.is_file() and file not in marks)


def _checksum(file: Path) -> int:
    """Return the CRC-32 of a file, which detects accidental damage at the speed of the disk."""
    value = 0
    with file.open("rb") as content:
        while chunk := content.read(_CHUNK):
            value = zlib.crc32(chunk, value)
    return value


def _is_whole(file: Path) -> bool:
    """Return whether a file has the length that its header states, as far as its format has one."""
    try:
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt"):  # compares the header with the length
                return True
        if file.suffix in (".pt", ".pth", ".bin"):
            return zipfile.is_zipfile(file)  # whose table of contents is at the end
        if file.suffix == ".json":
            json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, SafetensorError):
        return False
    return True
