"""The folder of an evaluation: written by one process at a time, and resumed after a kill."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nalora.errors import NALoRAError, wrong_kind
from nalora.files import atomic
from nalora.runs import contents, marker
from nalora.runs.folder import read_jsonl
from nalora.runs.lock import FolderLock

# The keys of the rows in each file of an evaluation, and in each summary.
_ROW_KEYS = {
    "outputs.jsonl": {"id", "outputs", "tokens", "finished"},
    "scores.jsonl": {"id", "scores"},
    "losses.jsonl": {"id", "loss", "tokens"},
    "judgements.jsonl": {"key", "answer"},
}
_SUMMARY_KEYS = {name: {"task", "measures"} for name in ("summary.json", "losses.json")}


class Records:
    """A JSON-lines file of rows by id; rows in the file are not computed again.

    A row that a kill cut short is removed; a row that no evaluation wrote raises a NALoRAError.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        data = path.read_bytes() if path.is_file() else b""
        complete = data.rfind(b"\n") + 1
        if complete < len(data):
            with path.open("r+b") as file:
                file.truncate(complete)
        keys = _ROW_KEYS.get(path.name, {"id"})
        rows = read_jsonl(path)
        valid = [row for row in rows if row.keys() >= keys and isinstance(row["id"], str)]
        if len(valid) < data.count(b"\n"):
            raise NALoRAError(
                f"{path}, line {1 + next((i for i, row in enumerate(rows) if row not in valid), len(rows))}",
                found="a row that no evaluation wrote",
                expected=f"one with {', '.join(sorted(keys))}",
                fix="move the file away and evaluate again",
            )
        self.rows: dict[str, dict[str, Any]] = {row["id"]: row for row in valid}

    def __contains__(self, key: str) -> bool:
        return key in self.rows

    def add(self, rows: list[dict[str, Any]]) -> None:
        """Append rows; they are on the disk before this returns."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write("".join(atomic.json_text(row) + "\n" for row in rows))
            file.flush()
            os.fsync(file.fileno())
        self.rows |= {row["id"]: row for row in rows}

    def replace(self, rows: dict[str, dict[str, Any]]) -> None:
        """Write these rows in place of the file's, in one step."""
        atomic.write(self.path, "".join(atomic.json_text(row) + "\n" for row in rows.values()))
        self.rows = rows


@contextlib.contextmanager
def claimed_folder(folder: Path, *, take_over: bool = False) -> Iterator[None]:
    """Create and lock the folder for this process; remove what was created if nothing is written before an error.

    Raises:
        NALoRAError: files that nalora did not write, symbolic links in place of its files, or a lock of another process
            (see `FolderLock` for `take_over`).
    """
    marker.refuse_foreign(folder, "evaluation", option="--output", known=_is_of_0_1)
    for file in (folder / name for name in (*_ROW_KEYS, *_SUMMARY_KEYS)):
        if os.path.lexists(file) and (file.is_symlink() or not file.is_file()):
            raise wrong_kind(
                file, "file", "a file that an evaluation can append to", "move it away, or give another --output"
            )
    made = marker.mark(folder, "evaluation")
    try:
        # Two processes would append to the same files.
        with FolderLock(folder, take_over=take_over):
            yield
    except BaseException:
        if made.marker and [entry.name for entry in folder.iterdir()] == [marker.MARKER]:
            (folder / marker.MARKER).unlink(missing_ok=True)
            if made.folder:
                with contextlib.suppress(OSError):  # another process created a file there meanwhile
                    folder.rmdir()
        raise


def _is_of_0_1(folder: Path) -> bool:
    """Return whether version 0.1 evaluated there: all files have its names and keys."""
    return all(_has_keys(file) for file in folder.iterdir() if file.name != contents.LOCK)


def _has_keys(file: Path) -> bool:
    keys = _ROW_KEYS.get(file.name) or _SUMMARY_KEYS.get(file.name)
    if keys is None:
        return False
    try:
        with file.open(encoding="utf-8") as text:
            row = json.loads(text.readline() if file.suffix == ".jsonl" else text.read())
    except (OSError, ValueError):
        return False
    return isinstance(row, dict) and row.keys() >= keys
