"""The contents of diagnosis.json and of the file with the values of every channel."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nalora.diagnostics.measures import HISTOGRAM_EDGES, MEASURES, Distribution, Movement
from nalora.diagnostics.sites import GateSite
from nalora.files import atomic

VERSION = 1


@dataclass(frozen=True)
class Interval:
    """The steps of two states, the movements between them by site, and the masks of the later state if it has any."""

    start: int
    end: int
    movements: dict[int, Movement]
    masks: dict[int, Tensor]


# By step and site.
Distributions = Mapping[int, Mapping[int, Distribution]]


def contents(
    sites: Sequence[GateSite], intervals: Sequence[Interval], ends: Interval, states: Distributions
) -> dict[str, Any]:
    """Return the measured part of the file, without blocks that no token reached."""
    reached = sorted(ends.movements)
    rows = [_interval_row(interval, reached) for interval in intervals]
    shares = []
    histograms: dict[int, list[list[int]]] = {}
    for step, blocks in states.items():
        columns = zip(*(blocks[index].shares() or (None, None, None) for index in reached), strict=True)
        values = ([finite(share) for share in column] for column in columns)
        shares.append({"step": step, **dict(zip(("p_sup", "p_res", "p_pos"), values, strict=True))})
        if counts := [blocks[i].sums["histogram"].tolist() for i in reached if "histogram" in blocks[i].sums]:
            histograms[step] = counts
    return {
        "version": VERSION,
        "blocks": [described(sites[index]) for index in reached],
        "steps": list(states),
        "intervals": rows,
        "first_to_last": _interval_row(ends, reached),
        "cumulative": {
            name: [_total(column) for column in zip(*(row[name] for row in rows), strict=True)] for name in MEASURES
        },
        "shares": shares,
        "histogram": {"edges": list(HISTOGRAM_EDGES), "steps": list(histograms), "counts": list(histograms.values())},
    }


def described(site: GateSite) -> dict[str, Any]:
    """Return a block's entry in the file."""
    lower, upper = site.thresholds or (None, None)
    activation = site.activation.name
    return {"name": site.name, "activation": activation, "width": site.width, "lower": lower, "upper": upper}


def _interval_row(interval: Interval, reached: Sequence[int]) -> dict[str, Any]:
    """Return an interval with a list per measure and an entry per block; missing and non-finite values are None."""
    means = [interval.movements[index].means(interval.masks.get(index)) for index in reached]
    row: dict[str, Any] = {"from": interval.start, "to": interval.end, "masked": bool(interval.masks)}
    return row | {name: [finite(block[name]) for block in means] for name in MEASURES}


def write_channels(
    path: Path, sites: Sequence[GateSite], intervals: Sequence[Interval], ends: Interval, states: Distributions
) -> None:
    """Write every channel's values: ``block/measure`` [intervals, channels], ``block/first_to_last/measure``
    [channels], ``block/shares`` [states, 3, channels] and, with masks, ``block/mask`` [intervals, channels].
    """
    tensors: dict[str, Tensor] = {}
    for index in sorted(intervals[0].movements):
        name = sites[index].name
        rows = [interval.movements[index].per_channel() for interval in intervals]
        for measure, value in ends.movements[index].per_channel().items():
            tensors[f"{name}/{measure}"] = torch.stack([row[measure] for row in rows])
            tensors[f"{name}/first_to_last/{measure}"] = value
        blocks = [state[index] for state in states.values()]
        if "regimes" in blocks[0].sums:
            regimes = torch.stack([block.sums["regimes"] for block in blocks])
            tensors[f"{name}/shares"] = regimes.double() / blocks[0].tokens
        if all(index in interval.masks for interval in intervals):
            tensors[f"{name}/mask"] = torch.stack([interval.masks[index] for interval in intervals])
    atomic.save_tensors(path, {name: tensor.float() for name, tensor in tensors.items()})


def finite(value: float | None) -> float | None:
    """Return the value, or None if it is not finite: JSON has no NaN."""
    return value if value is not None and math.isfinite(value) else None


def _total(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) if len(known) == len(values) else None
