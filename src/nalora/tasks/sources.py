"""Read a task's data from the hub, or from files in the folder `data_dir`.

Missing or malformed data raises a NALoRAError that names the file and the row.
"""

from __future__ import annotations

import contextlib
import csv
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, TypeVar

from nalora.errors import NALoRAError, missing_package, require, shortened
from nalora.files import expanded

Rows = list[dict[str, Any]]
Value = TypeVar("Value")


class NoSplitError(NALoRAError):
    """Data that exists and has no such split."""


def hub_rows(task: str, dataset: str, split: str, name: str | None = None) -> Rows:
    """Return the rows of a split of a data set on the hub."""
    return list(hub_data(task, dataset, split, name))


def hub_data(
    where: str, dataset: str, split: str, name: str | None = None, instead: str = "give data_dir=FOLDER"
) -> Any:
    """Return a split of a data set on the hub as a `datasets.Dataset`, which reads rows on access.

    Args:
        where: the task or the source, for errors.
        dataset: its name on the hub.
        split: such as ``train``.
        name: the configuration, if the data set has several.
        instead: what to do without the hub, for errors.

    Raises:
        NoSplitError: the data set has no such split.
        NALoRAError: it cannot be loaded.
    """
    library = datasets_library(where, instead)
    try:
        splits = library.load_dataset(dataset, name)  # all are prepared at once, whichever is used
    except Exception as error:  # the hub's errors share no type: connection, permission, missing, damaged
        raise NALoRAError(
            where,
            found=f"no dataset {dataset!r} ({type(error).__name__}: {str(error).partition(chr(10))[0]})",
            expected=f"its split {split!r} from the hub",
            fix=f"check the name, the network and `hf auth login`, or {instead}",
        ) from error
    if split not in splits:
        raise NoSplitError(
            where, found=f"no split {split!r}", expected=f"one of {', '.join(splits)}", fix="name the file itself"
        )
    return splits[split]


def datasets_library(where: str, instead: str) -> Any:
    """Return the module `datasets`; raise a NALoRAError if it is not installed."""
    try:
        import datasets
    except ImportError as error:
        raise missing_package(where, "datasets", "to read this data", "'nalora[hub]'", f", or {instead}") from error
    return datasets


def read_rows(
    task: str, data_dir: str | Path | None, files: Sequence[str], dataset: str, split: str, name: str | None = None
) -> tuple[str, Rows]:
    """Return (source, rows) of the first of these files in the folder, or of the hub's data set without a folder."""
    if data_dir is None:
        return dataset, hub_rows(task, dataset, split, name)
    file = find_file(task, data_dir, files)
    return str(file), json_rows(file) if file.suffix == ".json" else jsonl_rows(file)


def holds(data_dir: str | Path | None, files: Sequence[str]) -> bool:
    """Return whether the folder contains one of these files."""
    return data_dir is not None and any((expanded(data_dir) / file).is_file() for file in files)


def find_file(task: str, data_dir: str | Path | None, candidates: Sequence[str]) -> Path:
    """Return the first of the candidates that exists in the folder."""
    found = "no data_dir"
    if data_dir is not None:
        folder = expanded(data_dir)
        for file in (folder / candidate for candidate in candidates):
            if file.is_file():
                return file
        found = f"none of {', '.join(candidates)} in {folder}" if folder.is_dir() else f"no folder {folder}"
    raise NALoRAError(
        task,
        found=found,
        expected="the data set's files there",
        fix="give the folder that holds them as data_dir, or leave data_dir out to read the hub",
    )


def jsonl_rows(file: Path) -> Rows:
    """Return the JSON objects of a file with one in each line."""
    with _opened(file) as lines:
        return [
            _object(_parsed(line, f"{file}:{number}", "one JSON object per line"), f"{file}:{number}")
            for number, line in enumerate(lines, 1)
            if line.strip()
        ]


def json_rows(file: Path) -> Rows:
    """Return the objects of a JSON list, or of a file with one object in each line, as some copies are."""
    with _opened(file) as lines:
        text = lines.read()
    if text.lstrip().startswith("{"):
        return jsonl_rows(file)
    rows = _parsed(text, str(file), "one JSON list")
    if not isinstance(rows, list):
        raise _malformed(str(file), shortened(repr(rows), 40), "one JSON list")
    return [_object(row, f"{file}, row {index}") for index, row in enumerate(rows)]


def tsv_rows(file: Path, columns: Sequence[str] | None = None) -> Rows:
    """Return unquoted tab-separated values; the first line has the names of the columns unless they are given."""
    # The limit applies to the whole process; by default 131,072 characters, which a premise may exceed.
    limit = csv.field_size_limit(2**31 - 1)
    try:
        with _opened(file, newline="") as lines:
            return list(csv.DictReader(lines, fieldnames=columns, delimiter="\t", quoting=csv.QUOTE_NONE))
    except csv.Error as error:
        raise _malformed(str(file), f"no table ({error})", "tab-separated values") from error
    finally:
        csv.field_size_limit(limit)


def field(row: dict[str, Any], name: str, where: str, kind: type[Value] = object) -> Value:  # type: ignore[assignment]
    """Return the row's value of that name and type."""
    value = row.get(name)
    if value is None or not isinstance(value, kind):
        word = {str: "text ", int: "whole number ", list: "list "}.get(kind, "")
        raise _malformed(where, f"no {word}{name!r} among {', '.join(map(str, row))}", "the data set's own columns")
    return value


def text(row: dict[str, Any], name: str, where: str) -> str:
    """Return the row's text of that name."""
    return field(row, name, where, str)


def texts(row: dict[str, Any], name: str, where: str, least: int = 1) -> list[str]:
    """Return the row's list of at least `least` texts of that name."""
    values = field(row, name, where, list)
    if len(values) < least or not all(isinstance(value, str) for value in values):
        raise _malformed(where, f"{name!r} of {shortened(repr(values), 40)}", f"a list of {least} texts or more")
    return values


@contextlib.contextmanager
def _opened(file: Path, newline: str | None = None) -> Iterator[IO[str]]:
    """Open a UTF-8 file, with or without a byte order mark."""
    try:
        with file.open(encoding="utf-8-sig", newline=newline) as lines:
            yield lines
    except UnicodeDecodeError as error:
        raise NALoRAError(
            str(file),
            found=f"the byte 0x{error.object[error.start]:02x}, which is not UTF-8",
            expected="UTF-8",
            fix="convert it: iconv -f LATIN1 -t UTF-8",
        ) from error


def _parsed(line: str, where: str, expected: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise _malformed(where, f"no JSON ({error.msg})", expected) from error


def _object(row: Any, where: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise _malformed(where, shortened(repr(row), 40), "a JSON object")
    return row


def one_of(task: str, option: str, value: str, choices: Sequence[str]) -> None:
    """Raise a NALoRAError for an option's value that is not one of the choices."""
    require(value in choices, f"{task}, {option}", value, f"one of {', '.join(choices)}", "give one of these")


def _malformed(where: str, found: str, expected: str) -> NALoRAError:
    return NALoRAError(where, found=found, expected=expected, fix="fetch the data set again, or give another data_dir")
