"""Where a task's data comes from: the hub, or files in a folder the user gives as `data_dir`.

Data that is not there, or is something else, raises a NALoRAError that names the file and the row.
"""

from __future__ import annotations

import contextlib
import csv
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, TypeVar

from nalora.errors import NALoRAError, missing_package, require

Rows = list[dict[str, Any]]
Value = TypeVar("Value")


def hub_rows(task: str, dataset: str, split: str, name: str | None = None) -> Rows:
    """A split of a hub dataset."""
    return list(hub_data(task, dataset, split, name))


def hub_data(task: str, dataset: str, split: str, name: str | None = None, folder: str = "FOLDER") -> Any:
    """The same as the hub's own type, which reads a row when it is needed; `folder` is what may take its place."""
    try:
        import datasets
    except ImportError as error:
        raise missing_package(
            task, "datasets", "to read the hub, or the files themselves", "nalora[hub]", f", or give data_dir={folder}"
        ) from error
    try:
        return datasets.load_dataset(dataset, name, split=split)
    except Exception as error:  # the hub's errors share no type: connection, permission, missing, damaged
        raise NALoRAError(
            task,
            found=f"no dataset {dataset!r} ({type(error).__name__}: {str(error).partition(chr(10))[0]})",
            expected=f"its split {split!r} from the hub",
            fix=f"check the network and `hf auth login`, or give data_dir={folder}",
        ) from error


def read_rows(
    task: str, data_dir: str | Path | None, files: Sequence[str], dataset: str, split: str, name: str | None = None
) -> tuple[str, Rows]:
    """(where they are from, the rows): the first of these files that is in the folder, or the hub without a folder."""
    if data_dir is None:
        return dataset, hub_rows(task, dataset, split, name)
    file = find_file(task, data_dir, files)
    return str(file), json_rows(file) if file.suffix == ".json" else jsonl_rows(file)


def holds(data_dir: str | Path | None, files: Sequence[str]) -> bool:
    """Whether one of these files is in the folder."""
    return data_dir is not None and any((Path(data_dir).expanduser() / file).is_file() for file in files)


def find_file(task: str, data_dir: str | Path | None, candidates: Sequence[str]) -> Path:
    """The first of the candidates that exists under the folder."""
    folder = Path(data_dir).expanduser() if data_dir is not None else None
    for file in (folder / candidate for candidate in candidates if folder):
        if file.is_file():
            return file
    missing = f"none of {', '.join(candidates)} in {folder}" if folder and folder.is_dir() else f"no folder {folder}"
    raise NALoRAError(
        task,
        found=missing if folder else "no data_dir",
        expected="the data set's files there",
        fix="give the folder that holds them as data_dir, or leave data_dir out to read the hub",
    )


def jsonl_rows(file: Path) -> Rows:
    """A JSON object for each line."""
    rows = []
    with _text_of(file) as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                rows.append(_object(_parsed(line, f"{file}:{number}", "one JSON object a line"), f"{file}:{number}"))
    return rows


def json_rows(file: Path) -> Rows:
    """The objects of one JSON list; lines of them too, as some copies have under the same name."""
    with _text_of(file) as lines:
        text = lines.read()
    if text.lstrip().startswith("{"):
        return jsonl_rows(file)
    rows = _parsed(text, str(file), "one JSON list")
    if not isinstance(rows, list):
        raise _wrong(str(file), _in_short(rows), "one JSON list")
    return [_object(row, f"{file}, row {index}") for index, row in enumerate(rows)]


def tsv_rows(file: Path, columns: Sequence[str] | None = None) -> Rows:
    """Tab-separated values, unquoted; the column names from the first line unless they are given."""
    # The limit is of the whole process; 131,072 characters by default, which a premise may exceed.
    limit = csv.field_size_limit(2**31 - 1)
    try:
        with _text_of(file, newline="") as lines:
            return list(csv.DictReader(lines, fieldnames=columns, delimiter="\t", quoting=csv.QUOTE_NONE))
    except csv.Error as error:
        raise _wrong(str(file), f"no table ({error})", "tab-separated values") from error
    finally:
        csv.field_size_limit(limit)


def field(row: dict[str, Any], name: str, where: str, kind: type[Value] = object) -> Value:  # type: ignore[assignment]
    """A row's value of that name and kind."""
    value = row.get(name)
    if value is None or not isinstance(value, kind):
        word = {str: "text ", int: "whole number ", list: "list "}.get(kind, "")
        raise _wrong(where, f"no {word}{name!r} among {', '.join(map(str, row))}", "the data set's own columns")
    return value


def text(row: dict[str, Any], name: str, where: str) -> str:
    """A row's text of that name."""
    return field(row, name, where, str)


def texts(row: dict[str, Any], name: str, where: str, least: int = 1) -> list[str]:
    """A row's list of texts of that name."""
    found = field(row, name, where, list)
    if len(found) < least or not all(isinstance(each, str) for each in found):
        raise _wrong(where, f"{name!r} of {_in_short(found)}", f"a list of {least} texts or more")
    return found


@contextlib.contextmanager
def _text_of(file: Path, newline: str | None = None) -> Iterator[IO[str]]:
    """A file of UTF-8, with a mark of that at its beginning or without."""
    try:
        with file.open(encoding="utf-8-sig", newline=newline) as lines:
            yield lines
    except UnicodeDecodeError as error:
        raise NALoRAError(
            str(file),
            found=f"the byte 0x{error.object[error.start]:02x}, which is no UTF-8",
            expected="UTF-8",
            fix="convert it: iconv -f LATIN1 -t UTF-8",
        ) from error


def _parsed(line: str, where: str, expected: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise _wrong(where, f"no JSON ({error.msg})", expected) from error


def _object(row: Any, where: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise _wrong(where, _in_short(row), "a JSON object")
    return row


def _in_short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 40 else f"{shown[:39]}…"


def one_of(task: str, option: str, value: str, choices: Sequence[str]) -> None:
    """Refuse an option's value that is none of the choices."""
    require(value in choices, f"{task}, {option}", value, f"one of {', '.join(choices)}", "give one of these")


def _wrong(where: str, found: str, expected: str) -> NALoRAError:
    return NALoRAError(where, found=found, expected=expected, fix="fetch the data set again, or give another data_dir")
