"""Layers and their channels in the page's data: the norms of their update, and how their gates moved."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nalora.report.capacity import Capacity
from nalora.report.data import RunData

CHANNEL_MEASURES = ("D_sel", "flip", "kappa_drift", "D_EH", "D_EH_live", "mask")
# Names that models give to the gate of a layer, the most specific first.
_GATES = ("gate_proj", "gate_up_proj", "w1", "wi_0", "wi", "fc1", "gate", "up_proj", "intermediate.dense")
# Projections in the order in which a layer uses them.
_ORDER = ("q", "k", "v", "qkv", "o", "out", "wi_0", "gate", "gate_up", "w1", "fc1", "wi", "wi_1", "up", "w3", "down",
          "fc2", "wo")  # fmt: skip
Measures = dict[str, NDArray[np.float64]]


def packed(values: Any) -> dict[str, Any]:
    """Return an array as little-endian float32 in base64; NaN means no value."""
    array = np.asarray(values, dtype="<f4")
    return {"f32": base64.b64encode(array.tobytes()).decode("ascii"), "shape": list(array.shape)}


def update_norms(capacity: Capacity, most: int) -> dict[str, Any]:
    """Return the norms as a table of layers × projections, and those of the channels of each layer's gate."""
    layers = list(capacity.layers().values())
    kinds = sorted(dict.fromkeys(kind for modules in layers for kind in modules), key=_order)
    table = [[capacity.modules[modules[k]] if k in modules else math.nan for k in kinds] for modules in layers]
    channels = []
    for modules in layers:
        gate = _gate_of(modules)
        rows = capacity.rows[modules[gate]] if gate else np.zeros(0)
        numbers = _largest(rows, most)
        channels.append({
            "kind": gate, "width": len(rows), "numbers": numbers.tolist() if len(numbers) < len(rows) else None,
            "norms": packed(rows[numbers]),
        })  # fmt: skip
    short = [kind.rpartition(".")[2] for kind in kinds]
    return {
        "labels": capacity.layer_norms()[0],
        "kinds": short if len(set(short)) == len(short) else kinds,
        "norms": packed(np.array(table)),
        "channels": channels,
    }


def channel_measures(run: RunData, blocks: list[str], capacity: Capacity | None, most: int) -> dict[str, Any] | None:
    """Return per-channel measures by layer; of wide layers the channels with the largest update and the most flips."""
    read = _read_channels(run, blocks)
    if read is None:
        return None
    layers = []
    for block, measures in zip(blocks, read, strict=True):
        order = next((measures[name] for name in ("flip", "D_sel") if name in measures), None)
        if order is None:
            layers.append({"numbers": [], "width": 0, "measures": {}})
            continue
        projections = capacity.of_block(block) if capacity else {}
        gate = _gate_of(projections)
        norms = capacity.rows[projections[gate]] if capacity and gate else np.zeros(0)
        width = order.shape[1]
        numbers = _largest(np.nansum(order, axis=0), most // 2 if len(norms) == width else most)
        if len(norms) == width:
            numbers = np.union1d(numbers, _largest(norms, most // 2))
        layers.append({
            "numbers": numbers.tolist(), "width": width,
            "measures": {name: packed(measures[name][:, numbers].T) for name in CHANNEL_MEASURES if name in measures},
        })  # fmt: skip
    return {"layers": layers}


def _read_channels(run: RunData, blocks: Sequence[str]) -> list[Measures] | None:
    """Return the per-channel measures of a diagnosis, for every block as [intervals, channels]; None without any."""
    name = (run.diagnosis or {}).get("channels")
    if not isinstance(name, str) or not (run.path / name).is_file():
        return None
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        tensors = load_file(run.path / name)
    except (SafetensorError, OSError, ValueError):
        run.notices.append(f"{name} is damaged and was left out.")
        return None
    by_block: dict[str, Measures] = {block: {} for block in blocks}
    for key, tensor in tensors.items():
        block, _, measure = key.rpartition("/" if "/" in key else ".")
        if block in by_block and tensor.ndim == 2:
            by_block[block][measure] = tensor.astype(np.float64)
    return [by_block[block] for block in blocks] if any(by_block.values()) else None


def _largest(values: NDArray[np.float64], most: int) -> NDArray[np.int64]:
    """Return the indices of the `most` largest values, in rising order."""
    return np.sort(np.argsort(-values, kind="stable")[:most])


def _gate_of(modules: dict[str, str]) -> str | None:
    """Return which of a layer's projections is the gate."""
    return next((kind for ending in _GATES for kind in modules if kind.endswith(ending)), None)


def _order(kind: str) -> int:
    name = kind.rpartition(".")[2].removesuffix("_proj")
    return _ORDER.index(name) if name in _ORDER else len(_ORDER)
