"""diagnosis.json: what comparisons of states told, by interval and by block, as plain numbers."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nalora.diagnostics.measures import HISTOGRAM_EDGES, MEASURES, Movement, Standing
from nalora.diagnostics.sites import GateSite

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
    sites: Sequence[GateSite], intervals: Sequence[Interval], ends: Interval | None, states: Sequence[State]
) -> dict[str, Any]:
    """The part of the file that the measures fill; blocks that no token reached are left out."""
    reached = sorted(intervals[0].movements)
    rows = [interval_row(interval, reached) for interval in intervals]
    binned = [state for state in states if any(each.histogram is not None for each in state.standing.values())]
    return {
        "version": VERSION,
        "blocks": [described(sites[index]) for index in reached],
        "steps": [intervals[0].start, *(interval.end for interval in intervals)],
        "intervals": rows,
        "first_to_last": None if ends is None else interval_row(ends, reached),
        "cumulative": cumulative(rows),
        "shares": [share_row(state, reached) for state in states],
        "histogram": {
            "edges": list(HISTOGRAM_EDGES),
            "steps": [state.step for state in binned],
            "counts": [[_counts(state.standing[index]) for index in reached] for state in binned],
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
        columns = zip(*(row[name] for row in rows), strict=True)
        total[name] = [None if None in column else math.fsum(column) for column in columns]
    return total


def share_row(state: State, reached: Sequence[int]) -> dict[str, Any]:
    """A state's regime shares."""
    shares = [state.standing[index].shares() or (None, None, None) for index in reached]
    columns = zip(*shares, strict=True)
    return {"step": state.step, **dict(zip(("p_sup", "p_res", "p_pos"), map(list, columns), strict=True))}


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
    from safetensors.torch import save_file

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
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    save_file({name: tensor.float().cpu().contiguous() for name, tensor in tensors.items()}, partial)
    partial.replace(path)


def _counts(standing: Standing) -> list[int] | None:
    return None if standing.histogram is None else standing.histogram.tolist()


def _number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
