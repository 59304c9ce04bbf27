"""Rows of data files, read one at a time: JSON lines, JSON, CSV, TSV, Parquet, folders of them, data sets of the hub.

A file is read once from beginning to end, to check every row and to remember where it begins. After that a row is read
when it is needed, so that a file of many gigabytes takes eight bytes of memory per row.
"""

from __future__ import annotations

import difflib
import itertools
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from nalora.errors import NALoRAError, did_you_mean, refuse_all
from nalora.files import expanded
from nalora.models.file_digest import digest_of_file
from nalora.tasks.sources import NoSplitError, datasets_library, hub_data
from nalora.tasks.text_files import JsonLines, Report, Row, Table, UnreadableLinesError

Checked = TypeVar("Checked")
SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
HUB = "hub:"
_CONVERT = "convert the data to JSON lines"
# The first word of a file's name that makes it part of a split.
_SPLITS = {
    "train": "train", "training": "train", "test": "test", "testing": "test",
    "valid": "validation", "validation": "validation", "dev": "validation", "eval": "validation",
}  # fmt: skip


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
    folder = expanded(name)
    return folder.is_dir() and any(file.suffix.lower() in SUFFIXES for file in folder.iterdir())


def open_rows(source: str | Path, split: str = "train", report: Report = lambda *progress: None) -> Rows:
    """Open a data file, the files of a split in a folder, or a split of a data set of the hub.

    Raises:
        NoSplitError: a folder or data set without that split.
        UnreadableLinesError: lines that are no rows, of all files.
        NALoRAError: nothing there, or a kind of file that is not supported.
    """
    if str(source).startswith(HUB):
        return _hub(str(source)[len(HUB) :], split)
    parts: list[Rows] = []
    errors: list[UnreadableLinesError] = []
    for file in files_for(source, split):
        try:
            parts.append(_opened(file, report))
        except UnreadableLinesError as error:
            errors.append(error)
            parts += error.readable
    if len(errors) == 1:
        raise UnreadableLinesError(errors[0].where, errors[0].found, errors[0].expected, parts)
    if errors:
        found = "; ".join(f"{Path(error.where).name}: {error.found}" for error in errors)
        raise UnreadableLinesError(str(source), found, " and ".join({error.expected: None for error in errors}), parts)
    return _joined(parts)


def opened_and_checked(open_file: Callable[[], Rows], check: Callable[[Rows], Checked]) -> Checked:
    """Return what `check` makes of the rows; one error names the problems of lines and those that `check` finds."""
    try:
        rows = open_file()
    except UnreadableLinesError as error:
        if any(map(len, error.readable)):
            _check_others(error, check)
        raise
    return check(rows)


def _check_others(error: UnreadableLinesError, check: Callable[[Rows], Any]) -> None:
    try:
        check(_joined([part for part in error.readable if len(part)]))
    except NALoRAError as other:
        problems = [(True, problem.found, problem.fix) for problem in (error, other)]
        refuse_all(error.where, f"{error.expected}, and {other.expected}", problems)


def files_for(source: str | Path, split: str) -> list[Path]:
    """Return the files of a split, existing or not: those of a folder, or the file itself; none of the hub."""
    path = expanded(source)
    if str(source).startswith(HUB):
        return []
    return files_of(path, split) if path.is_dir() else [path]


def contents(source: str) -> dict[str, str]:
    """Return the SHA-256 of a file, or of a folder's data files, by name; of the hub only the name is known."""
    path = expanded(source)
    files = sorted(file for file in path.iterdir() if file.suffix.lower() in SUFFIXES) if path.is_dir() else [path]
    return {file.name: digest_of_file(file) for file in files if file.is_file()} or {source: ""}


def files_of(folder: Path, split: str) -> list[Path]:
    """Return a split's files: those named after it, or for training all others where none is.

    Raises:
        NoSplitError: no such file.
    """
    data = sorted(file for file in folder.iterdir() if file.suffix.lower() in SUFFIXES and file.is_file())
    names = {file: _SPLITS.get(re.split(r"[-_.]", file.stem.lower())[0]) for file in data}
    named = [file for file, name in names.items() if name == split]
    others = [file for file, name in names.items() if name is None]
    files = named or (others if split == "train" else [])
    if not files:
        raise NoSplitError(
            str(folder),
            found=f"no file for {split!r} among {', '.join(file.name for file in data) or 'no data files'}",
            expected=f"{split}.jsonl, or another of {', '.join(SUFFIXES)}",
            fix=f"add {split}.jsonl to the folder, or name the file itself",
        )
    return files


def _opened(path: Path, report: Report) -> Rows:
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise NALoRAError(
            str(path), found=f"the suffix {suffix!r}", expected=f"one of {', '.join(SUFFIXES)}", fix="convert the file"
        )
    if not path.is_file():
        siblings = [file for file in path.parent.iterdir() if file.is_file()] if path.parent.is_dir() else []
        # Without the suffix, which every data file has: of two short names it is most of the letters.
        near = difflib.get_close_matches(path.stem, [file.stem for file in siblings if is_data(file.name)], 1)
        names = [file.name for file in siblings if near and file.stem == near[0] and is_data(file.name)]
        raise NALoRAError(
            str(path),
            found="no such file",
            expected="a data file",
            fix=did_you_mean(path.name, names, f"check the path; the current folder is {Path.cwd()}"),
        )
    if suffix == ".parquet":
        return _parquet(path)
    if suffix == ".json" and _starts_with(path, b"["):
        return _json_list(path)
    if suffix in (".csv", ".tsv"):
        return Table(path, "," if suffix == ".csv" else "\t", report)
    return JsonLines(path, report)


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
    library = datasets_library(str(path), _CONVERT)
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
    rows = hub_data(HUB + name, dataset, split, config or None, _CONVERT)
    return _Loaded(rows, lambda index: f"{HUB}{name}, {split}, row {index}")


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
