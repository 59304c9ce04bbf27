"""Where a task's data comes from: the hub, or files in a folder the user gives as `data_dir`."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nalora.errors import NALoRAError

Rows = list[dict[str, Any]]


def hub_rows(task: str, dataset: str, split: str, name: str | None = None) -> Rows:
    """A split of a hub dataset.

    Raises:
        NALoRAError: `datasets` is not installed, or the hub did not give the dataset.
    """
    try:
        import datasets
    except ImportError as error:
        raise NALoRAError(
            task,
            found="no package `datasets`",
            expected="it, to read the hub, or the files themselves",
            fix="pip install nalora[hub], or give data_dir=FOLDER",
        ) from error
    try:
        return list(datasets.load_dataset(dataset, name, split=split))
    except Exception as error:  # the hub's errors share no type: connection, permission, missing, damaged
        raise NALoRAError(
            task,
            found=f"no dataset {dataset!r} ({type(error).__name__}: {str(error).partition(chr(10))[0]})",
            expected=f"its split {split!r} from the hub",
            fix="check the network and `hf auth login`, or give data_dir=FOLDER",
        ) from error


def find_file(task: str, data_dir: str | Path, candidates: Sequence[str]) -> Path:
    """The first of the candidates that exists under the folder.

    Raises:
        NALoRAError: none of them does.
    """
    folder = Path(data_dir).expanduser()
    for candidate in candidates:
        if (folder / candidate).is_file():
            return folder / candidate
    raise NALoRAError(
        task,
        found=f"none of {', '.join(candidates)} in {folder}" if folder.is_dir() else f"no folder {folder}",
        expected="the data set's files there",
        fix="give the folder that holds them as data_dir, or leave data_dir out to read the hub",
    )


def jsonl_rows(file: Path) -> Rows:
    """A JSON object for each line.

    Raises:
        NALoRAError: a line that is no JSON object.
    """
    rows = []
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise NALoRAError(
                    f"{file}:{number}",
                    found=f"no JSON ({error.msg})",
                    expected="one JSON object a line",
                    fix="fetch the file again",
                ) from error
            rows.append(row)
    return rows


def tsv_rows(file: Path, columns: Sequence[str] | None = None) -> Rows:
    """Tab-separated values, unquoted; the column names from the first line unless they are given."""
    with file.open(encoding="utf-8-sig", newline="") as lines:
        return list(csv.DictReader(lines, fieldnames=columns, delimiter="\t", quoting=csv.QUOTE_NONE))
