"""What the page's script is given: every number of the runs, packed."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nalora import activations
from nalora.errors import NALoRAError
from nalora.report.capacity import Capacity, read_capacity
from nalora.report.channels import read_channels
from nalora.report.data import RunData, layer_labels
from nalora.report.gates import Gates

MEASURES = ("D_sel", "flip", "kappa_drift", "suppressive", "positive", "severe", "D_EH")
_GATE_COLUMNS = ("p_sup", "p_res", "p_pos", "kept_share", "stability", "scale_gate", "scale_up", "scale_down")
_METRICS = ("loss", "grad_norm", "learning_rate", "seconds")
# A heat map is some 1,000 pixels wide; more columns than this cannot be told apart.
MOST_COLUMNS = 600
# All gate columns of all runs together: 4 bytes each, 5.3 as text, so at most 4.3 MB of the page.
MOST_GATE_NUMBERS = 800_000
# Channels kept of a layer and a projection; of wider layers those with the largest update.
MOST_CHANNELS = 1024
_CURVE_POINTS = 241


def payload(runs: Sequence[RunData]) -> dict[str, Any]:
    """The runs as JSON-ready values."""
    return {"runs": [_run(run, columns_of(runs)) for run in runs]}


def columns_of(runs: Sequence[RunData]) -> int:
    """How many steps of gates.jsonl are kept of each run, so that the page stays small."""
    layers = sum(len(run.gates.blocks) for run in runs if run.gates)
    return max(2, min(MOST_COLUMNS, MOST_GATE_NUMBERS // max(1, layers * len(_GATE_COLUMNS))))


def packed(values: Any) -> dict[str, Any]:
    """An array as little-endian float32 in base64; NaN stands for nothing."""
    array = np.asarray(values, dtype="<f4")
    return {"f32": base64.b64encode(array.tobytes()).decode("ascii"), "shape": list(array.shape)}


def kept_rows(count: int, most: int) -> NDArray[np.int64]:
    """Which of `count` rows are shown: all, or evenly spread ones with the first and the last."""
    return np.arange(count) if count <= most else np.unique(np.linspace(0, count - 1, most).round().astype(np.int64))


def _run(run: RunData, most_columns: int) -> dict[str, Any]:
    capacity, why_no_capacity = read_capacity(run)
    return {
        "name": run.name,
        "method": run.method,
        "missing": {**run.missing, **({"capacity": why_no_capacity} if why_no_capacity else {})},
        "metrics": {name: dict(zip(("x", "y"), map(packed, run.series(name)), strict=True)) for name in _METRICS},
        "evaluations": {task: {who: _scores(s) for who, s in asked.items()} for task, asked in run.evaluations.items()},
        "gates": _gates(run.gates, most_columns) if run.gates else None,
        "curves": _curves(run),
        "diagnosis": _diagnosis(run),
        "mismatch": _mismatch(run.mismatch),
        "capacity": _capacity(capacity) if capacity else None,
    }


def _scores(summary: dict[str, Any]) -> dict[str, Any]:
    """Every measure with its interval; the loss of the right answers under the name it has in a table."""
    scores = {}
    measures = summary.get("measures")
    for name, measured in (measures if isinstance(measures, dict) else {}).items():
        interval = measured.get("binomial") or measured.get("bootstrap")
        scores[name] = {"value": finite(measured.get("value")), "interval": finite(interval)}
    if isinstance(loss := summary.get("target_loss"), dict):
        scores["loss of the answers"] = {"value": finite(loss.get("value")), "interval": finite(loss.get("bootstrap"))}
    return {"examples": summary.get("examples"), "scores": scores, "chance": finite(summary.get("chance") or {})}


def _gates(gates: Gates, most: int) -> dict[str, Any]:
    rows = kept_rows(len(gates.steps), most)
    return {
        "labels": layer_labels(gates.blocks),
        "activations": gates.activations,
        "thresholds": gates.thresholds,
        "logged": len(gates.steps),
        "steps": [int(step) for step in gates.steps[rows]],
        # [layers, steps]: a heat map's rows.
        "columns": {name: packed(gates.columns[name][rows].T) for name in _GATE_COLUMNS if name in gates.columns},
    }


def _curves(run: RunData) -> dict[str, Any]:
    """κ of every activation that the run's gates have, by name; without the curves of those nalora does not know."""
    names = set(run.gates.activations if run.gates else ())
    for source in (run.diagnosis, run.mismatch):
        names |= {str(block.get("activation")) for block in (source or {}).get("blocks", ()) if isinstance(block, dict)}
    curves = {}
    z = torch.linspace(-6, 6, _CURVE_POINTS, dtype=torch.float64)
    for name in sorted(names):
        try:
            inner, _, bound = name.partition("≤")
            activation = activations.get(inner)
            activation = activations.clamped(activation, float(bound)) if bound else activation
        except (NALoRAError, ValueError):
            continue
        curves[name] = {"z": packed(z), "kappa": packed(activation.kappa(z)), "phi": packed(activation.phi(z))}
    return curves


def _diagnosis(run: RunData) -> dict[str, Any] | None:
    """The diagnosis with its measures as [blocks, intervals]."""
    found = run.diagnosis
    if found is None:
        return None
    blocks = [block for block in found["blocks"] if isinstance(block, dict)]
    intervals = [each for each in found["intervals"] if isinstance(each, dict)]
    histogram = found.get("histogram")
    return {
        "labels": layer_labels([str(block.get("name", i)) for i, block in enumerate(blocks)]),
        "activations": [str(block.get("activation")) for block in blocks],
        "thresholds": [finite([block.get("lower"), block.get("upper")]) for block in blocks],
        "steps": finite(found["steps"]),
        "ends": [[each.get("from"), each.get("to")] for each in intervals],
        "measures": {name: packed(_by_block(intervals, name, len(blocks))) for name in MEASURES},
        "first_to_last": {name: finite((found.get("first_to_last") or {}).get(name)) for name in MEASURES},
        "cumulative": {name: finite((found.get("cumulative") or {}).get(name)) for name in MEASURES},
        "histogram": finite(histogram) if isinstance(histogram, dict) and histogram.get("counts") else None,
        "channels": _channels(run, blocks),
    }  # fmt: skip


def _channels(run: RunData, blocks: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Per-channel measures, by layer: of wide layers the channels that changed regime most often."""
    found = read_channels(run, [str(block.get("name")) for block in blocks])
    if found is None:
        return None
    layers = []
    for measures in found:
        order = next((measures[name] for name in ("flip", "D_sel") if name in measures), None)
        if order is None:
            layers.append({"numbers": [], "width": 0, "measures": {}})
            continue
        numbers = largest(np.nansum(order, axis=0), MOST_CHANNELS // 4)
        layers.append({
            "numbers": numbers.tolist(), "width": order.shape[1],
            "measures": {name: packed(values[:, numbers].T) for name, values in measures.items()},
        })  # fmt: skip
    return {"layers": layers}


def largest(values: NDArray[np.float64], most: int) -> NDArray[np.int64]:
    """The places of the `most` largest values, in rising order."""
    if len(values) <= most:
        return np.arange(len(values))
    return np.sort(np.argsort(-values, kind="stable")[:most])


def _mismatch(found: dict[str, Any] | None) -> dict[str, Any] | None:
    if found is None:
        return None
    blocks = [block for block in found["blocks"] if isinstance(block, dict)]
    return {
        "labels": layer_labels([str(block.get("name", i)) for i, block in enumerate(blocks)]),
        **{key: finite(found.get(key)) for key in ("target", "energy", "share", "bound", "mask", "top_channels")},
    }


def _capacity(capacity: Capacity) -> dict[str, Any]:
    """Norms as a table of layers × projections, and the channels of each layer's gate."""
    layers: dict[str, dict[str, str]] = {}
    for module in capacity.modules:
        parts = module.split(".")
        end = next((i + 1 for i, part in enumerate(parts) if part.isdigit()), 0)
        place, kind = ".".join(parts[:end]), ".".join(parts[end:])
        layers.setdefault(place, {})[kind] = module
    kinds = list(dict.fromkeys(kind for each in layers.values() for kind in each))
    table = [[capacity.modules[each[k]] if k in each else math.nan for k in kinds] for each in layers.values()]
    channels = []
    for each in layers.values():
        gate = gate_of(each)
        rows = capacity.rows[each[gate]] if gate else np.zeros(0)
        numbers = largest(rows, MOST_CHANNELS)
        channels.append({
            "kind": gate, "width": len(rows), "numbers": numbers.tolist() if len(numbers) < len(rows) else None,
            "norms": packed(rows[numbers]),
        })  # fmt: skip
    labels = layer_labels(list(layers)) if len(layers) > 1 else [place.rpartition(".")[2] or "all" for place in layers]
    shown = [kind.rpartition(".")[2] for kind in kinds]
    return {
        "labels": labels,
        "kinds": shown if len(set(shown)) == len(shown) else kinds,
        "norms": packed(np.array(table)),
        "total": packed(np.sqrt(np.nansum(np.square(table), axis=1))),
        "channels": channels,
    }


def gate_of(modules: dict[str, str]) -> str | None:
    """Which of a layer's projections is the gate, by the names that models give it."""
    for ending in ("gate_proj", "gate_up_proj", "w1", "wi_0", "wi", "fc1", "gate", "up_proj", "intermediate.dense"):
        for kind in modules:
            if kind.endswith(ending):
                return kind
    return None


def finite(value: Any) -> Any:
    """A JSON value without NaN and infinities, which JavaScript's reader refuses; numbers to 6 digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return value if isinstance(value, int | str | None) else str(value)


def _by_block(intervals: list[dict[str, Any]], measure: str, width: int) -> NDArray[np.float64]:
    """A measure as [blocks, intervals]; NaN where there is no number."""
    table = np.full((width, len(intervals)), math.nan)
    for place, interval in enumerate(intervals):
        values = interval.get(measure)
        if isinstance(values, list) and len(values) == width:
            table[:, place] = [float(v) if isinstance(v, int | float) else math.nan for v in values]
    return table
