"""gates.jsonl: what every block's gates did at every logged step, and which controls acted on them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nalora.control.metrics import FOLLOWED, NAMES
from nalora.control.recorded import RecordedBlock, applied_row, recorded_block

Array = NDArray[np.float64]
_NUMBERS = {int, float, type(None)}
_Reasons = tuple[tuple[str, ...], tuple[str, ...]]
_COLUMNS = (*NAMES, *FOLLOWED.values())


@dataclass(frozen=True)
class Gates:
    """The file as arrays.

    Attributes:
        blocks: names, in the order of the model.
        activations: the name of each block's.
        thresholds: the bounds of each block's responsive regime; None for an activation without regimes.
        mask_off: why the mask does not act on each block; empty where it acts.
        scaling_off: why the steps of each block are not scaled; empty where they are.
        steps: of the rows.
        columns: by the names of `control.metrics`, each [steps, blocks]; NaN where a row says nothing. Values are those
            applied; what was only followed is under its own name, also of runs made by 0.1.
    """

    blocks: tuple[str, ...]
    activations: tuple[str, ...]
    thresholds: tuple[tuple[float, float] | None, ...]
    mask_off: tuple[str, ...]
    scaling_off: tuple[str, ...]
    steps: NDArray[np.int64]
    columns: Mapping[str, Array]

    def why_no_mask(self) -> str:
        """A sentence where the mask acts on no block; empty otherwise."""
        return _why_off("The channel mask does not act in this run", self.mask_off)

    def why_no_scaling(self) -> str:
        """A sentence where no step is scaled; empty otherwise."""
        return _why_off("The steps of this run are not scaled", self.scaling_off)


def _why_off(what: str, reasons: Sequence[str]) -> str:
    return f"{what}: {'; '.join(dict.fromkeys(reasons))}." if all(reasons) else ""


def read_gates(path: Path, settings: Mapping[str, Any], notices: list[str]) -> Gates | None:
    """The file; None where it is not there or tells nothing. Damaged lines are skipped and counted.

    Args:
        path: of the file.
        settings: the run's, from which it is known what acted in a run of 0.1.
        notices: gets a sentence on what is damaged.
    """
    if not path.is_file():
        return None
    head, *lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    header = _header(head)
    if header is None:
        notices.append("gates.jsonl: its first line is damaged, so it was left out.")
        return None
    blocks, activations, thresholds, off = header
    recorded = [
        recorded_block(settings, activation, has_regimes=bounds is not None)
        for activation, bounds in zip(activations, thresholds, strict=True)
    ]
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
    ordered = [rows[step] if off else applied_row(rows[step], recorded) for step in sorted(rows)]
    empty = [None] * len(blocks)
    columns = {
        name: np.array([row.get(name) or empty for row in ordered], dtype=np.float64)
        for name in _COLUMNS
        if any(name in row for row in ordered)
    }
    mask_off, scaling_off = off or _reasons(recorded)
    steps = np.array(sorted(rows), dtype=np.int64)
    return Gates(blocks, activations, thresholds, mask_off, scaling_off, steps, columns)


def _reasons(recorded: Sequence[RecordedBlock]) -> _Reasons:
    return tuple(block.mask_off for block in recorded), tuple(block.scaling_off for block in recorded)


def _header(
    line: str,
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[tuple[float, float] | None, ...], _Reasons | None] | None:
    """Blocks, activations, thresholds and why controls are off; None for the last where 0.1 wrote the file."""
    try:
        header = json.loads(line)
        blocks = tuple(map(str, header["blocks"]))
        given = header.get("thresholds") or [None] * len(blocks)
        activations = tuple(map(str, header.get("activations") or [""] * len(blocks)))
        thresholds = tuple(None if pair is None or None in pair else (float(pair[0]), float(pair[1])) for pair in given)
        off = None
        if "mask_off" in header and "scaling_off" in header:
            off = (tuple(map(str, header["mask_off"])), tuple(map(str, header["scaling_off"])))
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return None
    parts = [activations, thresholds, *(off or ())]
    whole = blocks and all(len(part) == len(blocks) for part in parts)
    return (blocks, activations, thresholds, off) if whole else None


def _row(line: str, width: int) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
        row["step"] = int(row["step"])
        for name in _COLUMNS:
            values = row.get(name)
            if values is not None and (len(values) != width or not _NUMBERS.issuperset(map(type, values))):
                return None
    except (ValueError, KeyError, TypeError):
        return None
    return row if isinstance(row, dict) else None
