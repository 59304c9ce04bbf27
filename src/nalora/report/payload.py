"""What the page's script is given: every number of the runs, packed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nalora.control.recorded import named_activation
from nalora.report.capacity import Capacity, read_capacity
from nalora.report.data import RunData, layer_labels
from nalora.report.gates import Gates
from nalora.report.packing import finite, kept_rows, packed
from nalora.report.paper_figures import measure_table
from nalora.report.payload_layers import CHANNEL_MEASURES, channel_measures, update_norms
from nalora.report.sentences import LOSS, score

MEASURES = ("D_sel", "flip", "kappa_drift", "suppressive", "positive", "severe", "D_EH", "D_EH_live")
_GATE_COLUMNS = ("p_sup", "p_res", "p_pos", "kept_share", "stability", "scale_gate", "scale_up", "scale_down")
_METRICS = ("loss", "seconds")
# A heat map is some 1,000 pixels wide; more columns than this cannot be told apart.
MOST_COLUMNS = 600
# Numbers of all runs together. Each takes 4 bytes, 5.3 as text: at most 3.7 + 1.1 + 1.6 + 0.2 MB of the page.
MOST_GATE_NUMBERS = 700_000
MOST_NORMS = 200_000
MOST_CHANNEL_NUMBERS = 300_000
# Few, because a curve is drawn point by point: of ten runs 1,000 points each.
MOST_METRIC_NUMBERS = 40_000
# More points than this make a chart slow.
MOST_CHANNELS = 4096
_CURVE_POINTS = 241


@dataclass(frozen=True)
class Sizes:
    """How much of every run is kept, so that the page stays small however many runs it shows.

    Attributes:
        points: of a training curve.
        columns: steps of gates.jsonl.
        norms: channels of a layer whose update is shown.
        channels: channels of a layer whose measures are kept.
    """

    points: int
    columns: int
    norms: int
    channels: int


def sizes(runs: Sequence[RunData], capacities: Sequence[Capacity | None]) -> Sizes:
    """What fits."""
    layers = sum(len(run.gates.blocks) for run in runs if run.gates)
    adapted = sum(len(capacity.modules) for capacity in capacities if capacity) // 5  # some seven in a layer
    measured = sum(len(d["blocks"]) * len(d["intervals"]) for run in runs if (d := run.diagnosis) and d.get("channels"))
    return Sizes(
        points=max(200, MOST_METRIC_NUMBERS // (2 * len(_METRICS) * len(runs))),
        columns=max(2, min(MOST_COLUMNS, MOST_GATE_NUMBERS // max(1, layers * len(_GATE_COLUMNS)))),
        norms=max(16, min(MOST_CHANNELS, MOST_NORMS // max(1, adapted))),
        channels=max(8, MOST_CHANNEL_NUMBERS // max(1, measured * len(CHANNEL_MEASURES))),
    )


def payload(runs: Sequence[RunData]) -> dict[str, Any]:
    """The runs as JSON-ready values."""
    read = [read_capacity(run) for run in runs]
    kept = sizes(runs, [capacity for capacity, _ in read])
    return {"runs": [_run(run, *found, kept) for run, found in zip(runs, read, strict=True)]}


def _run(run: RunData, capacity: Capacity | None, why_no_capacity: str, kept: Sizes) -> dict[str, Any]:
    return {
        "name": run.name,
        "method": run.method,
        "missing": {**run.missing, **({"capacity": why_no_capacity} if why_no_capacity else {})},
        "metrics": {name: _metric(run, name, kept.points) for name in _METRICS},
        "evaluations": {task: {who: _scores(s) for who, s in asked.items()} for task, asked in run.evaluations.items()},
        "gates": _gates(run.gates, kept.columns) if run.gates else None,
        "curves": _curves(run),
        "diagnosis": _diagnosis(run, capacity, kept.channels),
        "mismatch": _mismatch(run.mismatch),
        "capacity": update_norms(capacity, kept.norms) if capacity else None,
    }


def _metric(run: RunData, name: str, most: int) -> dict[str, Any]:
    steps, values = run.series(name)
    rows = kept_rows(len(steps), most)
    return {"x": packed(steps[rows]), "y": packed(values[rows]), "logged": len(steps)}


def _scores(summary: dict[str, Any]) -> dict[str, Any]:
    """Every measure with its interval; the loss of the right answers under the name it has in a table."""
    scores = {
        name: {"value": finite(measured.value), "interval": finite(measured.interval)}
        for name in (*summary["measures"], LOSS)
        if (measured := score("", summary, name))
    }
    return {"examples": summary.get("examples"), "scores": scores, "chance": finite(summary.get("chance") or {})}


def _gates(gates: Gates, most: int) -> dict[str, Any]:
    rows = kept_rows(len(gates.steps), most)
    return {
        "labels": layer_labels(gates.blocks),
        "activations": gates.activations,
        "thresholds": gates.thresholds,
        "mask_off": gates.mask_off,
        "scaling_off": gates.scaling_off,
        "logged": len(gates.steps),
        "steps": [int(step) for step in gates.steps[rows]],
        # [layers, steps]: a heat map's rows.
        "columns": {name: packed(gates.columns[name][rows].T) for name in _GATE_COLUMNS if name in gates.columns},
    }


def _curves(run: RunData) -> dict[str, Any]:
    """κ of every activation that the run's gates have, by name; without the curves of those nalora does not know."""
    names = set(run.gates.activations if run.gates else ())
    for source in (run.diagnosis, run.mismatch):
        names |= {str(block.get("activation")) for block in (source or {}).get("blocks", ())}
    curves = {}
    z = torch.linspace(-6, 6, _CURVE_POINTS, dtype=torch.float64)
    for name in sorted(names):
        if (activation := named_activation(name)) is not None:
            curves[name] = {"z": packed(z), "kappa": packed(activation.kappa(z)), "phi": packed(activation.phi(z))}
    return curves


def _diagnosis(run: RunData, capacity: Capacity | None, most_channels: int) -> dict[str, Any] | None:
    """The diagnosis with its measures as [blocks, intervals]."""
    found = run.diagnosis
    if found is None:
        return None
    blocks = found["blocks"]
    return {
        "labels": layer_labels([str(block.get("name", i)) for i, block in enumerate(blocks)]),
        "activations": [str(block.get("activation")) for block in blocks],
        "thresholds": [finite([block.get("lower"), block.get("upper")]) for block in blocks],
        "steps": finite(found["steps"]),
        "ends": [[interval["from"], interval["to"]] for interval in found["intervals"]],
        "measures": {name: packed(measure_table(run, name).T) for name in MEASURES},
        "first_to_last": {name: finite((found.get("first_to_last") or {}).get(name)) for name in MEASURES},
        "cumulative": {name: finite((found.get("cumulative") or {}).get(name)) for name in MEASURES},
        "histogram": finite(found["histogram"]),
        "channels": channel_measures(run, [str(block.get("name")) for block in blocks], capacity, most_channels),
    }  # fmt: skip


def _mismatch(found: dict[str, Any] | None) -> dict[str, Any] | None:
    if found is None:
        return None
    blocks = found["blocks"]
    return {
        "labels": layer_labels([str(block.get("name", i)) for i, block in enumerate(blocks)]),
        **{key: finite(found.get(key)) for key in ("target", "energy", "share", "bound", "mask", "top_channels")},
    }
