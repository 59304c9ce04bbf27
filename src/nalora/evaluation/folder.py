"""The folder of an evaluation: one of nalora's own, in which one process writes at a time."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

from nalora.errors import wrong_kind
from nalora.evaluation.records import ROW_KEYS
from nalora.runs import contents, marker
from nalora.runs.lock import FolderLock

_SUMMARIES = ("summary.json", "losses.json")


@contextlib.contextmanager
def claimed_folder(folder: Path, *, take_over: bool = False) -> Iterator[None]:
    """The folder, made where it is missing, for this process alone; `take_over` as for `FolderLock`.

    Raises:
        NALoRAError: it holds files that nalora did not write, or another process writes into it.
    """
    refuse_foreign(folder)
    made = marker.mark(folder, "evaluation")
    try:
        # Answers of one process are lines of the same files as another's would be.
        with FolderLock(folder, take_over=take_over):
            yield
    except BaseException:
        _remove_if_nothing_was_written(folder, made)
        raise


def _remove_if_nothing_was_written(folder: Path, made: marker.Made) -> None:
    """Remove the marker and the folder that this process made, where they are all there is: as after a refusal."""
    if not made.marker or [entry.name for entry in folder.iterdir()] != [marker.MARKER]:
        return
    (folder / marker.MARKER).unlink(missing_ok=True)
    if made.folder:
        with contextlib.suppress(OSError):  # somebody put a file there meanwhile
            folder.rmdir()


def refuse_foreign(folder: Path) -> None:
    """Refuse a folder that is not nalora's, or whose files lead out of it. Nothing is touched.

    Raises:
        NALoRAError: it holds files that nalora did not write, or symbolic links under its own names.
    """
    marker.refuse_foreign(folder, "evaluation", option="--output", known=_is_of_0_1)
    for file in (folder / name for name in (*ROW_KEYS, *_SUMMARIES)):
        if contents.exists(file) and (file.is_symlink() or not file.is_file()):
            raise wrong_kind(
                file, "file", "a file that an evaluation can append to", "move it away, or give another --output"
            )


def _is_of_0_1(folder: Path) -> bool:
    """Whether version 0.1 evaluated there: all files have its names and its form."""
    files = [entry for entry in folder.iterdir() if entry.name != contents.LOCK]
    return all(
        _is_rows(file) if file.name in ROW_KEYS else file.name in _SUMMARIES and _is_summary(file) for file in files
    )


def _is_rows(file: Path) -> bool:
    try:
        with file.open(encoding="utf-8") as lines:
            row = json.loads(lines.readline())
    except (OSError, ValueError):
        return False
    return isinstance(row, dict) and row.keys() >= ROW_KEYS[file.name]


def _is_summary(file: Path) -> bool:
    try:
        summary = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(summary, dict) and "task" in summary and "measures" in summary
