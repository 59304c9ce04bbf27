"""A run's checkpoints on disk: which are whole, which is the latest, which may be removed.

A checkpoint is a folder that transformers' Trainer writes. nalora puts a file into it before the first byte (BEGUN) and
another one after the last (COMPLETE), which lists every file's size and checksum. So a folder without BEGUN is somebody
else's, one without COMPLETE was being written when the run was killed, and one whose files differ was damaged later.
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

from nalora.files import atomic

BEGUN = ".nalora-checkpoint.json"
COMPLETE = "complete"
# One whole checkpoint remains if the other turns out to be damaged.
KEPT = 2
_NAME = re.compile(r"checkpoint-(\d+)")
_CHUNK = 2**22
_OF_TRAINER = "trainer_state.json"


def step_in(name: str) -> int | None:
    """The step of a checkpoint's folder name; None for any other name."""
    found = _NAME.fullmatch(name)
    return int(found[1]) if found else None


def listed(place: Path) -> list[Path]:
    """Folders in `place` that are named as checkpoints, in the order of their steps; symbolic links are no folders."""
    if place.is_symlink() or not place.is_dir():
        return []
    steps = {path: step for path in place.iterdir() if (step := step_in(path.name)) is not None}
    return sorted((path for path in steps if path.is_dir() and not path.is_symlink()), key=lambda path: steps[path])


def is_own(checkpoint: Path) -> bool:
    """Whether nalora wrote it; version 0.1 left its mark only at the end."""
    return (checkpoint / BEGUN).is_file() or (
        (checkpoint / COMPLETE).is_file() and (checkpoint / _OF_TRAINER).is_file()
    )


def own(place: Path) -> Iterator[Path]:
    """The checkpoints that nalora wrote, whole or not."""
    return (checkpoint for checkpoint in listed(place) if is_own(checkpoint))


def marked_complete(place: Path) -> list[Path]:
    """The checkpoints that were written to their end."""
    return [checkpoint for checkpoint in own(place) if (checkpoint / COMPLETE).is_file()]


def latest(place: Path, before: float = math.inf, say: Callable[[str], None] = lambda line: None) -> Path | None:
    """The last whole checkpoint of a step before `before`; `say` receives a line for each damaged one."""
    for checkpoint in reversed(marked_complete(place)):
        if (step_in(checkpoint.name) or 0) >= before:
            continue
        if (problem := damage(checkpoint)) is None:
            return checkpoint
        say(f"{checkpoint.name} is damaged ({problem}); the checkpoint before it is used")
    return None


def damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint that is marked complete; None where nothing is."""
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
            return f"{name} has other content than was written"
    # Version 0.1 recorded no sizes; a disk may also return a file of the right size without its content.
    return next((f"{file.name} is cut short" for file in _files(checkpoint) if not _is_whole(file)), None)


def begin(checkpoint: Path) -> None:
    """Make the folder, empty and marked as nalora's, before anything is written into it."""
    if checkpoint.exists():
        shutil.rmtree(checkpoint)  # of nalora's own, see `is_free`: of the same step before the run was resumed
    checkpoint.mkdir(parents=True)
    atomic.note_created(checkpoint)
    atomic.write(checkpoint / BEGUN, atomic.json_text({"format": 1}) + "\n")


def is_free(checkpoint: Path) -> bool:
    """Whether a checkpoint may be written there: nothing is, or an earlier one of nalora's."""
    return not (checkpoint.exists() or checkpoint.is_symlink()) or (not checkpoint.is_symlink() and is_own(checkpoint))


def complete(checkpoint: Path) -> None:
    """Have every file on the disk, then mark the checkpoint as complete."""
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
    """Remove all but the last whole checkpoints; never a folder that nalora did not write."""
    whole = [checkpoint for checkpoint in marked_complete(place) if damage(checkpoint) is None]
    for old in whole[:-KEPT]:
        # The mark goes first: what is half removed is not complete any more.
        (old / COMPLETE).unlink()
        shutil.rmtree(old)


def remove_unfinished(place: Path) -> None:
    """Remove checkpoints that nalora began and did not finish: a step of resuming a run."""
    for checkpoint in own(place):
        if not (checkpoint / COMPLETE).is_file():
            shutil.rmtree(checkpoint)


def _files(checkpoint: Path) -> list[Path]:
    """Everything in a checkpoint but its two marks, sharded states in folders of their own included."""
    marks = (checkpoint / COMPLETE, checkpoint / BEGUN)
    return sorted(file for file in checkpoint.rglob("*") if file.is_file() and file not in marks)


def _checksum(file: Path) -> int:
    """The content's CRC-32: against accidents, at the speed of the disk."""
    value = 0
    with file.open("rb") as content:
        while chunk := content.read(_CHUNK):
            value = zlib.crc32(chunk, value)
    return value


def _is_whole(file: Path) -> bool:
    """Whether a file ends where its own header says; of kinds that say nothing, whether it is not empty."""
    try:
        if file.suffix == ".safetensors":
            return _ends_as_its_header_says(file)
        if file.suffix in (".pt", ".pth", ".bin"):
            return zipfile.is_zipfile(file)  # whose table of contents is at the end
        if file.suffix == ".json":
            json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return True


def _ends_as_its_header_says(file: Path) -> bool:
    """safetensors: 8 bytes of the header's length, the header in JSON, the tensors."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > file.stat().st_size:
            return False
        header = json.loads(opened.read(length))
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    return bool(file.stat().st_size == 8 + length + max(ends, default=0))
