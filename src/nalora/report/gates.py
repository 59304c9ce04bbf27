"""gates.jsonl: what every block's gates did at every logged step, and which activation a name stands for."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nalora.activations import Activation, clamped, get
from nalora.errors import NALoRAError
from nalora.metrics import NAMES

Array = NDArray[np.float64]
_NUMBERS = {int, float, type(None)}


@dataclass(frozen=True)
class Gates:
    """The file as arrays.

    Attributes:
        blocks: names, in the order of the model.
        activations: the name of each block's.
        thresholds: the bounds of each block's responsive regime; None for an activation without regimes.
        steps: of the rows.
        columns: by the names of `nalora.metrics`, each [steps, blocks]; NaN where a row says nothing.
    """

    blocks: tuple[str, ...]
    activations: tuple[str, ...]
    thresholds: tuple[tuple[float, float] | None, ...]
    steps: NDArray[np.int64]
    columns: Mapping[str, Array]


def read_gates(path: Path, notices: list[str]) -> Gates | None:
    """The file; None where it is not there or tells nothing. Damaged lines are skipped and counted."""
    if not path.is_file():
        return None
    head, *lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    header = _header(head)
    if header is None:
        notices.append("gates.jsonl: its first line is damaged, so it was left out.")
        return None
    blocks, activations, thresholds = header
    rows: dict[int, dict[str, Any]] = {}
    damaged = 0
    for line in filter(str.strip, lines):
        row = _row(line, len(blocks))
        if row is None:
            damaged += 1
        else:
            rows[row["step"]] = row
    if damaged:
        notices.append(f"gates.jsonl: {damaged} damaged {'line was' if damaged == 1 else 'lines were'} skipped.")
    if not rows:
        return None
    ordered = [rows[step] for step in sorted(rows)]
    empty = [None] * len(blocks)
    columns = {
        name: np.array([row.get(name) or empty for row in ordered], dtype=np.float64)
        for name in NAMES
        if any(name in row for row in ordered)
    }
    return Gates(blocks, activations, thresholds, np.array(sorted(rows), dtype=np.int64), columns)


def _header(line: str) -> tuple[tuple[str, ...], tuple[str, ...], tuple[tuple[float, float] | None, ...]] | None:
    try:
        header = json.loads(line)
        blocks = tuple(map(str, header["blocks"]))
        given = header.get("thresholds") or [None] * len(blocks)
        activations = tuple(map(str, header.get("activations") or [""] * len(blocks)))
        thresholds = tuple(None if pair is None or None in pair else (float(pair[0]), float(pair[1])) for pair in given)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return None
    whole = blocks and len(activations) == len(thresholds) == len(blocks)
    return (blocks, activations, thresholds) if whole else None


def _row(line: str, width: int) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
        row["step"] = int(row["step"])
        for name in NAMES:
            values = row.get(name)
            if values is not None and (len(values) != width or not _NUMBERS.issuperset(map(type, values))):
                return None
    except (ValueError, KeyError, TypeError):
        return None
    return row if isinstance(row, dict) else None


def named_activation(name: str) -> Activation | None:
    """The activation that a run's files name, clamped ones included (`silu≤7`); None where nalora knows no formula."""
    inner, _, bound = name.partition("≤")
    try:
        found = get(inner)
        return clamped(found, float(bound)) if bound and math.isfinite(float(bound)) else found
    except (NALoRAError, ValueError):
        return None
