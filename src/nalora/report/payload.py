"""The data of the page's script: the values of all charts, packed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from nalora.control.recorded import named_activation
from nalora.evaluation.answers import LOSS
from nalora.report.charts import (
    HEAT_MAPS,
    LINE_CHARTS,
    MEASURES,
    PAGE_LINES,
    SCALES,
    LineChart,
    difference_chart,
    measure_table,
    page_charts,
    running_mean,
    window_of,
)  # fmt: skip
from nalora.report.data import RunData
from nalora.report.gates import Gates
from nalora.report.layers import CHANNEL_MEASURES, channel_measures, packed, update_norms
from nalora.report.naming import layer_labels
from nalora.report.sentences import score
from nalora.tasks.text_measures import title_of

_GATE_COLUMNS = (*HEAT_MAPS, *SCALES)
_MISMATCH = ("energy", "share", "bound", "mask", "top_channels")
# A heat map is about 1,000 pixels wide; more columns than this are not visible.
MOST_COLUMNS = 600
# Numbers of all runs together. Each takes 4 bytes, 5.3 as text: at most 3.7 + 1.1 + 1.6 + 0.3 MB of the page.
MOST_GATE_NUMBERS = 700_000
MOST_NORMS = 200_000
MOST_CHANNEL_NUMBERS = 300_000
# Few, because a curve is drawn point by point: of ten runs 1,000 points each.
MOST_METRIC_NUMBERS = 40_000
# More points than this make a chart slow.
MOST_CHANNELS = 4096
_CURVE_POINTS = 241


class Sizes(NamedTuple):
    """How much of every run the page holds, so that its size is limited for any number of runs."""

    points: int  # of a training curve
    columns: int  # steps of gates.jsonl
    norms: int  # channels of a layer whose update is shown
    channels: int  # channels of a layer whose measures are shown


def _sizes(runs: Sequence[RunData]) -> Sizes:
    layers = sum(len(run.gates.blocks) for run in runs if run.gates)
    capacities = [run.capacity[0] for run in runs]
    adapted = sum(len(capacity.modules) for capacity in capacities if capacity) // 5  # about seven in a layer
    measured = sum(len(d["blocks"]) * len(d["intervals"]) for run in runs if (d := run.diagnosis) and d.get("channels"))
    return Sizes(
        points=max(200, MOST_METRIC_NUMBERS // (4 * len(runs))),
        columns=max(2, min(MOST_COLUMNS, MOST_GATE_NUMBERS // max(1, layers * len(_GATE_COLUMNS)))),
        norms=max(16, min(MOST_CHANNELS, MOST_NORMS // max(1, adapted))),
        channels=max(8, MOST_CHANNEL_NUMBERS // max(1, measured * len(CHANNEL_MEASURES))),
    )


def payload(runs: Sequence[RunData]) -> dict[str, Any]:
    """Return the descriptions of the charts and the values of the runs, JSON-ready."""
    most = _sizes(runs)
    return {"charts": page_charts(runs), "runs": [_run(run, runs[0], most) for run in runs]}


def _run(run: RunData, first: RunData, most: Sizes) -> dict[str, Any]:
    capacity, remark = run.capacity
    return {
        "name": run.name,
        "missing": {**run.missing, **({"capacity": remark} if remark else {})},
        "lines": {name: _line(LINE_CHARTS[name], run, most.points) for name in PAGE_LINES},
        "differences": {
            name: _line(difference_chart(LINE_CHARTS[name], first), run, most.points) for name in PAGE_LINES
        },
        "evaluations": {
            task: {model: _scores(summary) for model, summary in evaluated.items()}
            for task, evaluated in run.evaluations.items()
        },
        "gates": _gates(run.gates, most.columns) if run.gates else None,
        "curves": _curves(run),
        "diagnosis": _diagnosis(run, most.channels),
        "mismatch": run.mismatch
        and {
            "labels": _labels(run.mismatch["blocks"]),
            **{key: run.mismatch[key] for key in _MISMATCH},
        },
        "capacity": update_norms(capacity, most.norms) if capacity else None,
    }


def _kept_rows(count: int, most: int) -> NDArray[np.int64]:
    """Return the rows to show of `count`: all, or evenly spaced ones with the first and the last."""
    return np.arange(count) if count <= most else np.unique(np.linspace(0, count - 1, most).round().astype(np.int64))


def _line(chart: LineChart, run: RunData, most: int) -> dict[str, Any] | None:
    line = chart.read(run)
    if line is None:
        return None
    rows = _kept_rows(len(line.y), most)
    window = window_of(chart, line)
    return {
        "x": line.x if isinstance(line.x, list) else packed(line.x[rows]),
        "y": packed(line.y if isinstance(line.x, list) else line.y[rows]),
        "mean": packed(running_mean(line.y, window)[rows]) if window else None,
        "logged": len(line.y),
    }


def _scores(summary: dict[str, Any]) -> dict[str, Any]:
    """Return every measure with its interval, under its name in tables."""
    return {
        title_of(name): {"value": measured.value, "interval": measured.interval}
        for name in (*summary["measures"], LOSS)
        if (measured := score(summary, name))
    }


def _gates(gates: Gates, most: int) -> dict[str, Any]:
    rows = _kept_rows(len(gates.steps), most)
    return {
        "labels": layer_labels(gates.blocks),
        "activations": gates.activations,
        "thresholds": gates.thresholds,
        "mask_off": gates.mask_off,
        "scaling_off": gates.scaling_off,
        "logged": len(gates.steps),
        "steps": [int(step) for step in gates.steps[rows]],
        # [layers, steps]: the rows of a heat map.
        "columns": {name: packed(gates.columns[name][rows].T) for name in _GATE_COLUMNS if name in gates.columns},
    }


def _curves(run: RunData) -> dict[str, Any]:
    """Return κ of every activation of the run's gates that nalora has a formula for, by name."""
    names = set(run.gates.activations if run.gates else ())
    names |= {str(block.get("activation")) for block in (run.diagnosis or {}).get("blocks", ())}
    z = torch.linspace(-6, 6, _CURVE_POINTS, dtype=torch.float64)
    known = {name: activation for name in sorted(names) if (activation := named_activation(name)) is not None}
    return {name: {"z": packed(z), "kappa": packed(activation.kappa(z))} for name, activation in known.items()}


def _diagnosis(run: RunData, most_channels: int) -> dict[str, Any] | None:
    """Return the diagnosis with its measures as [blocks, intervals]."""
    diagnosis = run.diagnosis
    if diagnosis is None:
        return None
    blocks = diagnosis["blocks"]
    return {
        "labels": _labels(blocks),
        "activations": [str(block.get("activation")) for block in blocks],
        "thresholds": [[block.get("lower"), block.get("upper")] for block in blocks],
        "ends": [[interval["from"], interval["to"]] for interval in diagnosis["intervals"]],
        "measures": {name: packed(measure_table(run, name).T) for name in MEASURES},
        **{
            key: {name: (diagnosis.get(key) or {}).get(name) for name in MEASURES}
            for key in ("first_to_last", "cumulative")
        },
        "histogram": diagnosis["histogram"],
        "channels": channel_measures(run, [str(block.get("name")) for block in blocks], run.capacity[0], most_channels),
    }


def _labels(blocks: Sequence[dict[str, Any]]) -> list[str]:
    return layer_labels([str(block.get("name", i)) for i, block in enumerate(blocks)])
