"""JSON files of a run, reduced to the parts that have the shape a report relies on; damage becomes a notice."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeGuard

from nalora.errors import counted

Object = dict[str, Any]


def read_object(
    path: Path, notices: list[str], clean: Callable[[Object], Object | None] | None = None
) -> Object | None:
    """Return a JSON object, cleaned; None if there is no file, and with a notice if it cannot be used."""
    if not path.is_file():
        return None
    try:
        value = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except ValueError:
        value = None
    if not isinstance(value, dict):
        notices.append(f"{path.name} is damaged and was left out.")
        return None
    cleaned = clean(value) if clean else value
    if cleaned is None:
        notices.append(f"{path.name} lacks what a report needs and was left out.")
    return cleaned


def rows_by_step(
    lines: Iterable[str], name: str, notices: list[str], is_whole: Callable[[Object], bool] = lambda row: True
) -> list[Object]:
    """Return the rows of a log in the order of their steps; of a repeated step the last. Damaged lines are counted."""
    rows: dict[int, Object] = {}
    damaged = 0
    for line in filter(str.strip, lines):
        try:
            row = json.loads(line)
            row["step"] = int(row["step"])
            if is_whole(row):
                rows[row["step"]] = row
                continue
        except (ValueError, KeyError, TypeError):
            pass
        damaged += 1
    if damaged:
        notices.append(f"{name}: {counted(damaged, 'damaged line')} {'was' if damaged == 1 else 'were'} skipped.")
    return [rows[step] for step in sorted(rows)]


def clean_summary(summary: Object) -> Object:
    """Return a summary whose measures and loss are numbers with two-sided intervals, or are absent."""
    measures = _object(summary.get("measures")) or {}
    clean = {str(name): measured for name, value in measures.items() if (measured := _measured(value)) is not None}
    return summary | {"measures": clean, "target_loss": _measured(summary.get("target_loss"))}


def is_partial(summary: Object) -> bool:
    """Whether only the first of a task's questions were evaluated; a summary without these counts is complete."""
    examples, questions = summary.get("examples"), summary.get("questions")
    return isinstance(examples, int) and isinstance(questions, int) and examples < questions


def clean_diagnosis(diagnosis: Object) -> Object | None:
    """Return a diagnosis with blocks and complete intervals; None without them."""
    blocks, intervals = diagnosis.get("blocks"), diagnosis.get("intervals")
    if not _objects(blocks) or not _objects(intervals) or not isinstance(diagnosis.get("steps"), list) or not blocks:
        return None
    histogram = _object(diagnosis.get("histogram")) or {}
    is_whole = all(isinstance(histogram.get(key), list) and histogram[key] for key in ("edges", "steps", "counts"))
    return diagnosis | {
        "intervals": [interval for interval in intervals if {"from", "to"} <= interval.keys()],
        "first_to_last": _object(diagnosis.get("first_to_last")),
        "cumulative": _object(diagnosis.get("cumulative")),
        "histogram": histogram if is_whole else None,
    }


def clean_mismatch(mismatch: Object) -> Object | None:
    """Return a mismatch with blocks, energies and shares; None without them."""
    if not _objects(mismatch.get("blocks")) or not _objects([mismatch.get("energy"), mismatch.get("share")]):
        return None
    top_channels = mismatch.get("top_channels")
    return mismatch | {
        "bound": _object(mismatch.get("bound")),
        "mask": _object(mismatch.get("mask")),
        "top_channels": top_channels if isinstance(top_channels, list) else [],
    }


def _measured(value: Any) -> Object | None:
    if not isinstance(value, dict) or not isinstance(value.get("value"), int | float):
        return None
    intervals = {key: value[key] for key in ("binomial", "bootstrap") if _is_interval(value.get(key))}
    return {"value": value["value"], **intervals}


def _is_interval(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(end, int | float) for end in value)


def _object(value: Any) -> Object | None:
    return value if isinstance(value, dict) else None


def _objects(value: Any) -> TypeGuard[list[Object]]:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)
