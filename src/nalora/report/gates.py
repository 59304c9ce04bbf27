"""gates.jsonl: the statistics of every block's gates at every logged step, and which controls acted on the blocks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nalora.control.metrics import FOLLOWED, NAMES
from nalora.control.recorded import applied_row, recorded_block
from nalora.report.reading import rows_by_step

_NUMBERS = {int, float, type(None)}
_COLUMNS = (*NAMES, *FOLLOWED.values())


@dataclass(frozen=True)
class Gates:
    """The file as arrays.

    Attributes:
        blocks: names, in the order of the model.
        activations: the name of each block's activation.
        thresholds: the bounds of each block's responsive regime; None for an activation without regimes.
        mask_off: why the mask does not act on each block; empty where it acts.
        scaling_off: why the steps of each block are not scaled; empty where they are.
        steps: of the rows.
        columns: by the names of `control.metrics`, each [steps, blocks]; NaN where a row has no value. Values are those
            applied; values that were only followed have names that start with ``followed_``, also in runs of 0.1.
    """

    blocks: tuple[str, ...]
    activations: tuple[str, ...]
    thresholds: tuple[tuple[float, float] | None, ...]
    mask_off: tuple[str, ...]
    scaling_off: tuple[str, ...]
    steps: NDArray[np.int64]
    columns: Mapping[str, NDArray[np.float64]]

    def controls_off(self) -> dict[str, str]:
        """Return a sentence for each control, ``mask`` or ``scaling``, that acts on no block."""
        controls = {
            "mask": ("The channel mask does not act in this run", self.mask_off),
            "scaling": ("The steps of this run are not scaled", self.scaling_off),
        }
        return {
            control: f"{sentence}: {'; '.join(dict.fromkeys(reasons))}."
            for control, (sentence, reasons) in controls.items()
            if all(reasons)
        }


class _Header(NamedTuple):
    blocks: tuple[str, ...]
    activations: tuple[str, ...]
    thresholds: tuple[tuple[float, float] | None, ...]
    # Absent from files of 0.1.
    mask_off: tuple[str, ...] | None
    scaling_off: tuple[str, ...] | None


def read_gates(path: Path, settings: Mapping[str, Any], notices: list[str]) -> Gates | None:
    """Return the file's content; None where there is none or no row can be read.

    Args:
        path: of the file.
        settings: the run's, which determine the controls that acted in a run of 0.1.
        notices: gets a sentence on what is damaged.
    """
    if not path.is_file():
        return None
    head, *lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    header = _read_header(head)
    if header is None:
        notices.append("gates.jsonl: its first line is damaged, so it was left out.")
        return None
    blocks, activations, thresholds, mask_off, scaling_off = header
    rows = rows_by_step(lines, path.name, notices, lambda row: _is_whole(row, len(blocks)))
    if not rows:
        return None
    if mask_off is None or scaling_off is None:
        recorded = [
            recorded_block(settings, activation, has_regimes=bounds is not None)
            for activation, bounds in zip(activations, thresholds, strict=True)
        ]
        rows = [applied_row(row, recorded) for row in rows]
        mask_off, scaling_off = (tuple(block.mask_off for block in recorded), tuple(b.scaling_off for b in recorded))
    steps = np.array([row["step"] for row in rows], dtype=np.int64)
    columns = {
        name: np.array([row.get(name) or [None] * len(blocks) for row in rows], dtype=np.float64)
        for name in _COLUMNS
        if any(name in row for row in rows)
    }
    return Gates(blocks, activations, thresholds, mask_off, scaling_off, steps, columns)


def _read_header(line: str) -> _Header | None:
    try:
        header = json.loads(line)
        count = len(header["blocks"])
        bounds: Sequence[Any] = header.get("thresholds") or [None] * count
        reasons = {"mask_off", "scaling_off"} <= header.keys()
        result = _Header(
            tuple(map(str, header["blocks"])),
            tuple(map(str, header.get("activations") or [""] * count)),
            tuple(None if pair is None or None in pair else (float(pair[0]), float(pair[1])) for pair in bounds),
            tuple(map(str, header["mask_off"])) if reasons else None,
            tuple(map(str, header["scaling_off"])) if reasons else None,
        )
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return None
    return result if count and all(len(part) == count for part in result if part is not None) else None


def _is_whole(row: dict[str, Any], width: int) -> bool:
    """Whether every column is absent or has a number, or null, for every block."""
    columns = [row[name] for name in _COLUMNS if row.get(name) is not None]
    return all(len(values) == width and _NUMBERS.issuperset(map(type, values)) for values in columns)
