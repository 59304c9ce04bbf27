"""gates.jsonl: the statistics of every block's gates at every logged step, and which controls acted on the blocks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nalora.control.metrics import FOLLOWED, NAMES
from nalora.control.recorded import applied_row, recorded_block
from nalora.report.reading import rows_by_step

_NUMBERS = {int, float, type(None)}
_COLUMNS = (*NAMES, *FOLLOWED.values())
_REASONS = ("mask_off", "scaling_off")


@dataclass(frozen=True)
class Gates:
    """The file as arrays, with a value for each block in the order of the model.

    Columns have the names of `control.metrics` and the shape [steps, blocks], with NaN where a row has no value. Values
    are those applied; values that were only followed have names that start with ``followed_``, also in runs of 0.1.
    """

    blocks: tuple[str, ...]
    activations: tuple[str, ...]
    thresholds: tuple[
        tuple[float, float] | None, ...
    ]  # of the responsive regime; None for an activation without regimes
    mask_off: tuple[str, ...]  # why the mask does not act on a block; empty where it acts
    scaling_off: tuple[str, ...]  # why the steps of a block are not scaled; empty where they are
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


def read_gates(path: Path, settings: Mapping[str, Any], notices: list[str]) -> Gates | None:
    """Return the file's content; None where there is none or no row can be read.

    The run's settings determine the controls that acted in a run of 0.1; damage adds a sentence to `notices`.
    """
    if not path.is_file():
        return None
    head, *lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    header = _read_header(head)
    if header is None:
        notices.append("gates.jsonl: its first line is damaged, so it was left out.")
        return None
    width = len(header["blocks"])
    rows = rows_by_step(lines, path.name, notices, lambda row: _is_whole(row, width))
    if not rows:
        return None
    if "mask_off" not in header:
        recorded = [
            recorded_block(settings, activation, has_regimes=bounds is not None)
            for activation, bounds in zip(header["activations"], header["thresholds"], strict=True)
        ]
        rows = [applied_row(row, recorded) for row in rows]
        header |= {name: tuple(getattr(block, name) for block in recorded) for name in _REASONS}
    steps = np.array([row["step"] for row in rows], dtype=np.int64)
    columns = {
        name: np.array([row.get(name) or [None] * width for row in rows], dtype=np.float64)
        for name in _COLUMNS
        if any(name in row for row in rows)
    }
    return Gates(**header, steps=steps, columns=columns)


def _read_header(line: str) -> dict[str, Any] | None:
    """Return the parts of the first line, one value for each block; without `_REASONS` where 0.1 wrote the file."""
    try:
        header = json.loads(line)
        count = len(header["blocks"])
        bounds = header.get("thresholds") or [None] * count
        parts: dict[str, Any] = {
            "blocks": tuple(map(str, header["blocks"])),
            "activations": tuple(map(str, header.get("activations") or [""] * count)),
            "thresholds": tuple(
                None if not pair or None in pair else (float(pair[0]), float(pair[1])) for pair in bounds
            ),
        }
        if header.keys() >= set(_REASONS):
            parts |= {name: tuple(map(str, header[name])) for name in _REASONS}
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return None
    return parts if count and all(len(part) == count for part in parts.values()) else None


def _is_whole(row: dict[str, Any], width: int) -> bool:
    """Whether every column is absent or has a number, or null, for every block."""
    columns = [row[name] for name in _COLUMNS if row.get(name) is not None]
    return all(len(values) == width and _NUMBERS.issuperset(map(type, values)) for values in columns)
