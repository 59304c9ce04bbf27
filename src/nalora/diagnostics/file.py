"""diagnosis.json: what comparisons of states told, by interval and by block, as plain numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nalora.diagnostics.measures import HISTOGRAM_EDGES, MEASURES, Movement, Standing
from nalora.diagnostics.sites import GateSite
from nalora.files import atomic

VERSION = 1


@dataclass(frozen=True)
class Interval:
    """From one step to another: the movements by site, and the masks of the later state where it has them."""

    start: int
    end: int
    movements: dict[int, Movement]
    masks: dict[int, Tensor]


@dataclass(frozen=True)
class State:
    """Where the gates stand after a step, by site."""

    step: int
    standing: dict[int, Standing]


def contents(
    sites: Sequence[GateSite], intervals: Sequence[Interval], ends: Interval, states: Sequence[State]
) -> dict[str, Any]:
    """The part of the file that the measures fill; blocks that no token reached are left out."""
    reached = sorted(ends.movements)
    return assembled(
        [described(sites[index]) for index in reached],
        [interval_row(interval, reached) for interval in intervals],
        interval_row(ends, reached),
        [share_row(state, reached) for state in states],
        [row for state in states if (row := histogram_row(state, reached)) is not None],
    )


def assembled(
    blocks: list[dict[str, Any]],
    rows: list[dict[str, Any]],
    ends: dict[str, Any] | None,
    shares: list[dict[str, Any]],
    histograms: list[tuple[int, list[list[int]]]],
) -> dict[str, Any]:
    """The same from rows that were made one by one."""
    return {
        "version": VERSION,
        "blocks": blocks,
        "steps": [row["step"] for row in shares],
        "intervals": rows,
        "first_to_last": ends,
        "cumulative": cumulative(rows),
        "shares": shares,
        "histogram": {
            "edges": list(HISTOGRAM_EDGES),
            "steps": [step for step, _ in histograms],
            "counts": [counts for _, counts in histograms],
        },
    }


def described(site: GateSite) -> dict[str, Any]:
    """A block as the file names it."""
    lower, upper = site.thresholds or (None, None)
    activation = site.activation.name
    return {"name": site.name, "activation": activation, "width": site.width, "lower": lower, "upper": upper}


def interval_row(interval: Interval, reached: Sequence[int]) -> dict[str, Any]:
    """An interval with a list a measure, an entry for each block; what is missing or no number is null."""
    means = [interval.movements[index].means(interval.masks.get(index)) for index in reached]
    row: dict[str, Any] = {"from": interval.start, "to": interval.end, "masked": bool(interval.masks)}
    return row | {name: [_number(each[name]) for each in means] for name in MEASURES}


def cumulative(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Sums over the intervals."""
    total: dict[str, Any] = {}
    for name in MEASURES:
        # A run that was resumed may have rows from before a measure existed.
        columns = zip(*(row.get(name) or [None] * len(row["D_EH"]) for row in rows), strict=True)
        total[name] = [None if None in column else math.fsum(column) for column in columns]
    return total


def share_row(state: State, reached: Sequence[int]) -> dict[str, Any]:
    """A state's regime shares."""
    shares = [state.standing[index].shares() or (None, None, None) for index in reached]
    columns = ([_number(share) for share in column] for column in zip(*shares, strict=True))
    return {"step": state.step, **dict(zip(("p_sup", "p_res", "p_pos"), columns, strict=True))}


def histogram_row(state: State, reached: Sequence[int]) -> tuple[int, list[list[int]]] | None:
    """A step and the histogram of every block's z; None where they were not binned."""
    found = [state.standing[index].histogram for index in reached]
    counts = [each.tolist() for each in found if each is not None]
    return (state.step, counts) if counts else None


def write_channels(
    path: Path,
    sites: Sequence[GateSite],
    intervals: Sequence[Interval],
    ends: Interval,
    states: Sequence[State],
) -> None:
    """Every channel's values as tensors: ``block/measure`` [intervals, channels], ``block/first_to_last/measure``
    [channels], ``block/shares`` [states, 3, channels] and, where a mask was, ``block/mask`` [intervals, channels].
    """
    tensors: dict[str, Tensor] = {}
    for index in sorted(intervals[0].movements):
        name = sites[index].name
        rows = [interval.movements[index].per_channel() for interval in intervals]
        for measure, value in ends.movements[index].per_channel().items():
            if value is not None:
                tensors[f"{name}/{measure}"] = torch.stack([row[measure] for row in rows])  # type: ignore[misc]
                tensors[f"{name}/first_to_last/{measure}"] = value
        regimes = [state.standing[index].regimes for state in states]
        counted = [each for each in regimes if each is not None]
        if counted:
            tensors[f"{name}/shares"] = torch.stack(counted).double() / states[0].standing[index].tokens
        masks = [interval.masks.get(index) for interval in intervals]
        if (kept := [mask for mask in masks if mask is not None]) and len(kept) == len(masks):
            tensors[f"{name}/mask"] = torch.stack(kept)
    atomic.save_tensors(path, {name: tensor.float() for name, tensor in tensors.items()})


def _number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
