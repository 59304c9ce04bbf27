"""The output file of `nalora generate`: JSON lines that are continued after a kill and belong to one setup."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from nalora.errors import NALoRAError, wrong_kind
from nalora.files import atomic
from nalora.runs.lock import hold_file
from nalora.runs.writable import refuse_unwritable

_OPTION = "--output"
# How every row begins, with a key as `key_of` makes it. A kill cuts a row of more than 4,096 bytes at a page of memory,
# so what it leaves of the first row has at least this.
_BEGINNING = re.compile(rb'\{"key": "[0-9a-f]{10}", "row": ')


def refuse_foreign(path: Path) -> None:
    """Raise NALoRAError if the path is no new file and none that `nalora generate` began, before a model is loaded.

    A file that another process is writing is refused as well, and so is one without a complete row, unless it begins
    with a whole key: a shorter beginning of a row, such as ``{``, may be anybody's.
    """
    if os.path.lexists(path) and (path.is_symlink() or not path.is_file()):
        raise wrong_kind(path, "file", "a new file, or one to continue", f"give another {_OPTION}")
    refuse_unwritable(path.absolute().parent)
    if path.is_file():
        with path.open("rb") as file:
            line = file.readline()
        is_own = _row(line) if line.endswith(b"\n") else _BEGINNING.match(line)
        if line and not is_own:
            raise _refusal(path, "a file that this command did not write")
        _release(_hold(path))


class AnswerFile:
    """Rows with the key of their setup (model, prompts, settings) and their number in the input, in any order.

    The file belongs to one process at a time, from here to the end of a ``with`` block or to `close`.

    Args:
        path: of the file, new or from an earlier call.
        key: of the setup. A file whose rows have another key, or none, is never changed.

    Raises:
        NALoRAError: a file of another setup or program, one that another process is writing, a symbolic link, or no
            folder to write into.
    """

    def __init__(self, path: Path, key: str) -> None:
        refuse_foreign(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.key = path, key
        self.done: set[int] = set()
        self._held = _hold(path)
        try:
            self._read()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> AnswerFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let other processes write the file."""
        _release(self._held)
        self._held = None

    def _read(self) -> None:
        """Find the rows that are done, and remove one that a kill cut short."""
        complete = 0
        for line in self._lines():
            if self._is_cut_row(line, is_first=not complete):
                with self.path.open("r+b") as file:
                    file.truncate(complete)
                break
            row = _row(line)
            if row is None or row["key"] != self.key:
                others = "answers of another model, file or setting"
                is_row = row or _BEGINNING.match(line)
                raise _refusal(self.path, others if is_row else "a file that this command did not write")
            complete += len(line)
            self.done.add(row["row"])

    def _is_cut_row(self, line: bytes, *, is_first: bool) -> bool:
        """Return whether a kill cut the line short; without a row before it, the line must have the whole key."""
        beginning = atomic.json_text({"key": self.key, "row": 0})[: -len("0}")].encode()
        begins_as_own = line.startswith(beginning) if is_first else line[: len(beginning)] == beginning[: len(line)]
        return begins_as_own and not line.endswith(b"\n")

    def add(self, rows: Iterable[dict[str, Any]]) -> None:
        """Append rows, each with its number as ``row``; they are on the disk before this returns."""
        rows = list(rows)
        with self.path.open("a", encoding="utf-8") as file:
            file.write("".join(atomic.json_text({"key": self.key, **row}) + "\n" for row in rows))
            file.flush()
            os.fsync(file.fileno())
        self.done |= {row["row"] for row in rows}

    def sort(self) -> None:
        """Order the rows as in the input; batches are by length."""
        lines = list(self._lines())
        ordered = sorted(lines, key=lambda line: json.loads(line)["row"])
        if ordered != lines:
            atomic.write(self.path, b"".join(ordered))

    def _lines(self) -> Iterator[bytes]:
        if self.path.is_file():
            with self.path.open("rb") as file:
                yield from file


def _hold(path: Path) -> int | None:
    try:
        return hold_file(path)
    except BlockingIOError:
        raise NALoRAError(
            str(path),
            found="another process that is writing it",
            expected="one process at a time",
            fix=f"wait until it ends, or give another {_OPTION}",
        ) from None


def _release(held: int | None) -> None:
    if held is not None:
        os.close(held)


def _refusal(path: Path, found: str) -> NALoRAError:
    return NALoRAError(
        str(path),
        found=found,
        expected="a new file, or the unfinished output of the same command",
        fix=f"give another {_OPTION}, or move the file away",
    )


def _row(line: bytes) -> dict[str, Any] | None:
    """Return a row of an output file; None for a line of anything else."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    is_own = isinstance(row, dict) and isinstance(row.get("key"), str) and isinstance(row.get("row"), int)
    return row if is_own and "output" in row else None
