"""Text files with rows: read once to check every row and to remember where it begins, then row by row."""

from __future__ import annotations

import csv
import json
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from nalora.errors import NALoRAError, listed

Row = dict[str, Any]
# (What is done, how much of it, of how much), for a progress bar.
Report = Callable[[str, int, int], None]
# Rows between two reports: a file of 1 GB has a million of them.
REPORTED_ROWS = 2_000


class UnreadableLinesError(NALoRAError):
    """Lines of data files that are no rows.

    Args:
        where: the file or the folder.
        found: the lines and what is wrong with them.
        expected: the lines of such files.
        readable: the opened files, without these lines.
    """

    def __init__(self, where: str, found: str, expected: str, readable: Sequence[Any]) -> None:
        self.readable = readable
        super().__init__(where, found=found, expected=expected, fix="correct or remove these lines")


class TextFile:
    """A text file whose rows are read from remembered positions."""

    def __init__(self, path: Path, report: Report = lambda *progress: None) -> None:
        self.path = path
        self.starts, self.lines = array("Q"), array("Q")
        self._lock = threading.Lock()
        self._file = path.open("rb")
        if self._file.read(3) != b"\xef\xbb\xbf":  # a byte order mark is not part of the first row
            self._file.seek(0)
        if problems := listed(problem for problem in self._reported(report) if problem):
            raise UnreadableLinesError(str(path), problems, self.expected, [self])
        if not len(self):
            raise NALoRAError(str(path), found="no rows", expected=self.expected, fix="name another file")

    expected = "rows"

    def _reported(self, report: Report) -> Iterator[str | None]:
        name, megabytes = f"reading {self.path.name} (MB)", self.path.stat().st_size // 10**6
        for number, problem in enumerate(self._scan(), 1):
            if number % REPORTED_ROWS == 0:
                report(name, self.starts[-1] // 10**6 if self.starts else 0, megabytes)
            yield problem
        report(name, megabytes, megabytes)

    def _scan(self) -> Iterator[str | None]:
        """Remember where each good row begins, and yield for each row what is wrong with it."""
        raise NotImplementedError

    def _read(self, file: Iterator[bytes]) -> Row:
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> Row:
        with self._lock:
            self._file.seek(self.starts[index])
            try:
                return self._read(iter(self._file.readline, b""))
            except (ValueError, StopIteration) as error:  # every row was read without an error before
                raise NALoRAError(
                    self.where(index),
                    found="another content than when the file was opened",
                    expected="a file that nobody edits while it is read",
                    fix="start again, or continue a training with --resume and the unchanged file",
                ) from error

    def where(self, index: int) -> str:
        """Return the file and line of a row."""
        return f"{self.path}:{self.lines[index]}"

    def __del__(self) -> None:
        if (file := self.__dict__.get("_file")) is not None:
            file.close()

    def __getstate__(self) -> dict[str, Any]:
        """A worker process opens the file again."""
        return {key: value for key, value in self.__dict__.items() if key not in ("_file", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._file, self._lock = self.path.open("rb"), threading.Lock()


class Lines(TextFile):
    """A row in every line; empty lines are skipped."""

    def _scan(self) -> Iterator[str | None]:
        start = self._file.tell()
        for number, line in enumerate(self._file, 1):
            if line.strip():
                problem = self._problem(line)
                if problem is None:
                    self.starts.append(start)
                    self.lines.append(number)
                yield problem and f"line {number}: {problem}"
            start += len(line)

    def _problem(self, line: bytes) -> str | None:
        try:
            line.decode()
        except UnicodeDecodeError as error:
            return f"the byte 0x{line[error.start]:02x}, which is not UTF-8"
        return None


class JsonLines(Lines):
    """One JSON object per line."""

    expected = "one JSON object per line"

    def _problem(self, line: bytes) -> str | None:
        if (problem := super()._problem(line)) is not None:
            return problem
        try:
            row = json.loads(line.rstrip())
        except json.JSONDecodeError as error:
            return f"no JSON ({error.msg}, column {error.colno})"
        except ValueError as error:  # an integer of thousands of digits
            return str(error)
        except RecursionError:
            return "JSON that is nested too deeply"
        return None if isinstance(row, dict) else f"{type(row).__name__} instead of an object"

    def _read(self, file: Iterator[bytes]) -> Row:
        row: Row = json.loads(next(file))
        return row


class Table(TextFile):
    """Comma- or tab-separated values with a header; quoted fields may contain line breaks."""

    expected = "a header and rows with as many fields"

    def __init__(self, path: Path, delimiter: str, report: Report = lambda *progress: None) -> None:
        self.delimiter = delimiter
        self.header: list[str] = []
        super().__init__(path, report)

    def _scan(self) -> Iterator[str | None]:
        csv.field_size_limit(2**31 - 1)  # of the process; 131,072 characters by default
        yield from self._records()

    def _records(self) -> Iterator[str | None]:
        position = [self._file.tell(), 0]

        def lines() -> Iterator[str]:
            for line in self._file:
                position[0] += len(line)
                position[1] += 1
                yield line.decode("utf-8")

        reader = csv.reader(lines(), delimiter=self.delimiter, strict=True)
        while True:
            start, number = position[0], position[1] + 1
            try:
                fields = next(reader, None)
            except (csv.Error, UnicodeDecodeError) as error:
                yield f"line {number}: {error}"
                return
            if fields is None:
                return
            if not self.header:
                self.header = fields
                if repeated := {name for name in fields if fields.count(name) > 1}:
                    yield f"line {number}: the column {min(repeated)!r} twice"
            elif len(fields) == len(self.header):
                self.starts.append(start)
                self.lines.append(number)
                yield None
            elif fields:
                yield f"line {number}: {len(fields)} fields instead of {len(self.header)}"

    def _read(self, file: Iterator[bytes]) -> Row:
        csv.field_size_limit(2**31 - 1)
        fields = next(csv.reader((line.decode("utf-8") for line in file), delimiter=self.delimiter))
        return dict(zip(self.header, fields, strict=True))
