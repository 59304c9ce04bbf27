"""Files that others wrote, reduced to what has the shape that a report relies on."""

from __future__ import annotations

from typing import Any, TypeGuard


def clean_summary(summary: dict[str, Any]) -> dict[str, Any]:
    """A summary whose measures and loss are numbers with two-sided intervals, or are not there."""
    measures = summary.get("measures")
    measures = measures if isinstance(measures, dict) else {}
    clean = {str(name): found for name, value in measures.items() if (found := _measured(value)) is not None}
    return summary | {"measures": clean, "target_loss": _measured(summary.get("target_loss"))}


def is_partial(summary: dict[str, Any]) -> bool:
    """Whether only the first of a task's questions were asked; a summary that does not say counts as whole."""
    examples, questions = summary.get("examples"), summary.get("questions")
    return isinstance(examples, int) and isinstance(questions, int) and examples < questions


def clean_diagnosis(found: dict[str, Any]) -> dict[str, Any] | None:
    """A diagnosis whose blocks and intervals are whole; None where they are not."""
    blocks, intervals = found.get("blocks"), found.get("intervals")
    if not _objects(blocks) or not _objects(intervals) or not isinstance(found.get("steps"), list) or not blocks:
        return None
    clean = found | {"intervals": [interval for interval in intervals if {"from", "to"} <= interval.keys()]}
    for key in ("first_to_last", "cumulative"):
        clean[key] = found.get(key) if isinstance(found.get(key), dict) else None
    histogram = found.get("histogram")
    parts = [histogram.get(key) for key in ("edges", "steps", "counts")] if isinstance(histogram, dict) else [None]
    clean["histogram"] = histogram if all(isinstance(part, list) and part for part in parts) else None
    return clean


def clean_mismatch(found: dict[str, Any]) -> dict[str, Any] | None:
    """A mismatch with blocks, energies and shares; None where they are not there."""
    if not _objects(found.get("blocks")) or not all(isinstance(found.get(key), dict) for key in ("energy", "share")):
        return None
    clean = dict(found)
    for key in ("bound", "mask"):
        clean[key] = found.get(key) if isinstance(found.get(key), dict) else None
    clean["top_channels"] = found.get("top_channels") if isinstance(found.get("top_channels"), list) else []
    return clean


def _measured(value: Any) -> dict[str, Any] | None:
    if not isinstance(value, dict) or not isinstance(value.get("value"), int | float):
        return None
    intervals = {key: value[key] for key in ("binomial", "bootstrap") if _interval(value.get(key))}
    return {"value": value["value"], **intervals}


def _interval(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(end, int | float) for end in value)


def _objects(value: Any) -> TypeGuard[list[dict[str, Any]]]:
    return isinstance(value, list) and all(isinstance(each, dict) for each in value)
