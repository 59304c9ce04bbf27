"""Rows of data files, read one at a time: JSON lines, JSON, CSV, TSV, Parquet, folders of them, data sets of the hub.

A file is read once from beginning to end, to check every row and to remember where it begins. After that a row is read
when it is needed, so that a file of many gigabytes takes eight bytes of memory per row.
"""

from __future__ import annotations

import csv
import functools
import hashlib
import itertools
import json
import re
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from nalora.errors import NALoRAError, did_you_mean

Row = dict[str, Any]
SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
HUB = "hub:"
# The first word of a file's name that makes it part of a split.
_SPLITS = {
    "train": "train", "training": "train", "test": "test", "testing": "test",
    "valid": "validation", "validation": "validation", "dev": "validation", "eval": "validation",
}  # fmt: skip
# Invalid rows that an error lists; it also gives their total number.
_LISTED = 5


class Rows(Protocol):
    """A data file: rows by their number, and where each is for error messages."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Row: ...
    def where(self, index: int) -> str:
        """Return the file and line of a row."""


def is_data(name: str) -> bool:
    """Whether a task's name means a data file, a folder with data files, or a data set of the hub."""
    if name.startswith(HUB) or name.lower().endswith(SUFFIXES):
        return True
    folder = Path(name).expanduser()
    return folder.is_dir() and any(file.suffix.lower() in SUFFIXES for file in folder.iterdir())


def open_rows(source: str | Path, split: str = "train") -> Rows:
    """Open a data file, the files of a split in a folder, or a split of a data set of the hub.

    Raises:
        NALoRAError: nothing there, a kind of file that is not supported, or rows that cannot be read.
    """
    if str(source).startswith(HUB):
        return _hub(str(source)[len(HUB) :], split)
    path = Path(source).expanduser()
    if path.is_dir():
        return _joined([_opened(file) for file in files_of(path, split)])
    return _opened(path)


def digest(source: str) -> str:
    """Return a digest of the content of a file or of a folder's data files; the name of a data set of the hub."""
    path = Path(source).expanduser()
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    files = [file for file in files if file.is_file()]
    return source if not files else _digest(*((file, file.stat().st_mtime_ns, file.stat().st_size) for file in files))


@functools.cache
def _digest(*files: tuple[Path, int, int]) -> str:
    content = hashlib.sha256()
    for path, _, size in files:
        content.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                content.update(block)
    return content.hexdigest()


def files_of(folder: Path, split: str) -> list[Path]:
    """Return a split's files: those named after it, or for training all others where none is.

    Raises:
        NALoRAError: no such file.
    """
    data = sorted(file for file in folder.iterdir() if file.suffix.lower() in SUFFIXES and file.is_file())
    names = {file: _SPLITS.get(re.split(r"[-_.]", file.stem.lower())[0]) for file in data}
    named = [file for file, name in names.items() if name == split]
    others = [file for file, name in names.items() if name is None]
    files = named or (others if split == "train" else [])
    if not files:
        raise NALoRAError(
            str(folder),
            found=f"no file for {split!r} among {', '.join(file.name for file in data) or 'no data files'}",
            expected=f"{split}.jsonl, or another of {', '.join(SUFFIXES)}",
            fix=f"add {split}.jsonl to the folder, or name the file itself",
        )
    return files


def _opened(path: Path) -> Rows:
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise NALoRAError(
            str(path), found=f"the suffix {suffix!r}", expected=f"one of {', '.join(SUFFIXES)}", fix="convert the file"
        )
    if not path.is_file():
        siblings = [file.name for file in path.parent.iterdir()] if path.parent.is_dir() else []
        raise NALoRAError(
            str(path),
            found="no such file",
            expected="a data file",
            fix=did_you_mean(path.name, siblings, f"check the path; the current folder is {Path.cwd()}"),
        )
    if suffix == ".parquet":
        return _parquet(path)
    if suffix == ".json" and _starts_with(path, b"["):
        return _json_list(path)
    if suffix in (".csv", ".tsv"):
        return _Table(path, "," if suffix == ".csv" else "\t")
    return _JsonLines(path)


class _TextFile:
    """A text file whose rows are read from remembered positions."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.starts, self.lines = array("Q"), array("Q")
        self._lock = threading.Lock()
        self._file = path.open("rb")
        if self._file.read(3) != b"\xef\xbb\xbf":  # a byte order mark is not part of the first row
            self._file.seek(0)
        problems = [problem for problem in self._scan() if problem]
        if problems:
            shown = "; ".join(problems[:_LISTED])
            more = f"; … {len(problems):,} in total" if len(problems) > _LISTED else ""
            raise NALoRAError(
                str(path), found=shown + more, expected=self.expected, fix="correct or remove these lines"
            )
        if not len(self):
            raise NALoRAError(str(path), found="no rows", expected=self.expected, fix="name another file")

    expected = "rows"

    def _scan(self) -> Iterator[str | None]:
        """Remember where each row begins, and yield for each what is wrong with it."""
        raise NotImplementedError

    def _read(self, file: Iterator[bytes]) -> Row:
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> Row:
        with self._lock:
            self._file.seek(self.starts[index])
            return self._read(iter(self._file.readline, b""))

    def where(self, index: int) -> str:
        """Return the file and line of a row."""
        return f"{self.path}:{self.lines[index]}"

    def __getstate__(self) -> dict[str, Any]:
        """A worker process opens the file again."""
        return {key: value for key, value in self.__dict__.items() if key not in ("_file", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._file, self._lock = self.path.open("rb"), threading.Lock()


class _JsonLines(_TextFile):
    expected = "one JSON object per line"

    def _scan(self) -> Iterator[str | None]:
        start = self._file.tell()
        for number, line in enumerate(self._file, 1):
            if line.strip():
                self.starts.append(start)
                self.lines.append(number)
                yield _problem(line, number)
            start += len(line)

    def _read(self, file: Iterator[bytes]) -> Row:
        row: Row = json.loads(next(file))
        return row


def _problem(line: bytes, number: int) -> str | None:
    try:
        row = json.loads(line.rstrip())
    except UnicodeDecodeError as error:
        return f"line {number}: the byte 0x{line[error.start]:02x}, which is not UTF-8"
    except json.JSONDecodeError as error:
        return f"line {number}: no JSON ({error.msg}, column {error.colno})"
    except ValueError as error:  # an integer of thousands of digits
        return f"line {number}: {error}"
    except RecursionError:
        return f"line {number}: JSON that is nested too deeply"
    return None if isinstance(row, dict) else f"line {number}: {type(row).__name__} instead of an object"


class _Table(_TextFile):
    """Comma- or tab-separated values with a header; quoted fields may contain line breaks."""

    expected = "a header and rows with as many fields"

    def __init__(self, path: Path, delimiter: str) -> None:
        self.delimiter = delimiter
        self.header: list[str] = []
        super().__init__(path)

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
            elif fields:
                self.starts.append(start)
                self.lines.append(number)
                same = len(fields) == len(self.header)
                yield None if same else f"line {number}: {len(fields)} fields instead of {len(self.header)}"

    def _read(self, file: Iterator[bytes]) -> Row:
        csv.field_size_limit(2**31 - 1)
        fields = next(csv.reader((line.decode("utf-8") for line in file), delimiter=self.delimiter))
        return dict(zip(self.header, fields, strict=True))


class _Loaded:
    """Rows that are in memory or that a library reads when they are needed."""

    def __init__(self, rows: Any, place: Callable[[int], str]) -> None:
        self.rows, self.where = rows, place

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        return dict(self.rows[index])


def _json_list(path: Path) -> Rows:
    """One JSON list, which is read whole."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise NALoRAError(str(path), found=f"no JSON ({error})", expected="one JSON list", fix="correct it") from error
    wrong = [number for number, row in enumerate(rows) if not isinstance(row, dict)]
    if wrong or not rows:
        found = f"element {wrong[0]} of {len(rows):,} is no object" if wrong else "an empty list"
        raise NALoRAError(str(path), found=found, expected="a list of JSON objects", fix="correct it")
    return _Loaded(rows, lambda index: f"{path}, element {index}")


def _parquet(path: Path) -> Rows:
    library = _datasets(str(path))
    try:
        dataset = library.Dataset.from_parquet(str(path))
    except Exception as error:  # Arrow's errors share no type with those of datasets
        reason = str(error).partition("\n")[0]
        raise NALoRAError(
            str(path), found=f"no Parquet file ({reason})", expected="a Parquet file with rows", fix="write it again"
        ) from error
    return _Loaded(dataset, lambda index: f"{path}, row {index}")


def _hub(name: str, split: str) -> Rows:
    dataset, _, config = name.partition(":")
    library = _datasets(name)
    try:
        rows = library.load_dataset(dataset, config or None, split=split)
    except Exception as error:  # the hub's errors share no type: connection, permission, missing, damaged
        reason = str(error).partition("\n")[0]
        raise NALoRAError(
            HUB + name,
            found=f"no split {split!r} ({type(error).__name__}: {reason})",
            expected="a data set of the hub, as hub:owner/name or hub:owner/name:config",
            fix="check the name, the network and `hf auth login`",
        ) from error
    return _Loaded(rows, lambda index: f"{HUB}{name}, {split}, row {index}")


def _datasets(where: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise NALoRAError(
            where,
            found="no package `datasets`",
            expected="it, to read Parquet files and data sets of the hub",
            fix="pip install nalora[hub], or convert the data to JSON lines",
        ) from error
    return datasets


class _Joined:
    """The rows of several files, one file after another."""

    def __init__(self, parts: Sequence[Rows]) -> None:
        self.parts = parts
        self.starts = [0, *itertools.accumulate(map(len, parts))]

    def __len__(self) -> int:
        return self.starts[-1]

    def _part(self, index: int) -> tuple[Rows, int]:
        number = next(i for i, start in enumerate(self.starts[1:]) if index < start)
        return self.parts[number], index - self.starts[number]

    def __getitem__(self, index: int) -> Row:
        rows, place = self._part(index)
        return rows[place]

    def where(self, index: int) -> str:
        """Return the file and line of a row."""
        rows, place = self._part(index)
        return rows.where(place)


def _joined(parts: Sequence[Rows]) -> Rows:
    return parts[0] if len(parts) == 1 else _Joined(parts)


def _starts_with(path: Path, byte: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(byte)
