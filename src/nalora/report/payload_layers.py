"""Layers and their channels as a page carries them: how large their update is, how their gates moved."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from nalora.report.capacity import Capacity
from nalora.report.channels import read_channels
from nalora.report.data import RunData
from nalora.report.packing import largest, packed

CHANNEL_MEASURES = ("D_sel", "flip", "kappa_drift", "D_EH", "D_EH_live", "mask")


def update_norms(capacity: Capacity, most: int) -> dict[str, Any]:
    """Norms as a table of layers × projections, and the channels of each layer's gate."""
    layers = list(capacity.layers().values())
    kinds = sorted(dict.fromkeys(kind for modules in layers for kind in modules), key=_place_in_a_layer)
    table = [[capacity.modules[modules[k]] if k in modules else math.nan for k in kinds] for modules in layers]
    channels = []
    for modules in layers:
        gate = gate_of(modules)
        rows = capacity.rows[modules[gate]] if gate else np.zeros(0)
        numbers = largest(rows, most)
        channels.append({
            "kind": gate, "width": len(rows), "numbers": numbers.tolist() if len(numbers) < len(rows) else None,
            "norms": packed(rows[numbers]),
        })  # fmt: skip
    labels, total = capacity.layer_norms()
    shown = [kind.rpartition(".")[2] for kind in kinds]
    return {
        "labels": labels,
        "kinds": shown if len(set(shown)) == len(shown) else kinds,
        "norms": packed(np.array(table)),
        "total": packed(total),
        "channels": channels,
    }


def channel_measures(run: RunData, blocks: list[str], capacity: Capacity | None, most: int) -> dict[str, Any] | None:
    """Per-channel measures, by layer: of wide layers the channels with the largest update and with the most flips."""
    found = read_channels(run, blocks)
    if found is None:
        return None
    layers = []
    for block, measures in zip(blocks, found, strict=True):
        order = next((measures[name] for name in ("flip", "D_sel") if name in measures), None)
        if order is None:
            layers.append({"numbers": [], "width": 0, "measures": {}})
            continue
        projections = capacity.of_block(block) if capacity else {}
        gate = gate_of(projections)
        norms = capacity.rows[projections[gate]] if capacity and gate else np.zeros(0)
        moved = largest(np.nansum(order, axis=0), most if len(norms) != order.shape[1] else most // 2)
        numbers = np.union1d(moved, largest(norms, most // 2)) if len(norms) == order.shape[1] else moved
        layers.append({
            "numbers": numbers.tolist(), "width": order.shape[1],
            "measures": {name: packed(measures[name][:, numbers].T) for name in CHANNEL_MEASURES if name in measures},
        })  # fmt: skip
    return {"layers": layers}


def gate_of(modules: dict[str, str]) -> str | None:
    """Which of a layer's projections is the gate, by the names that models give it."""
    for ending in ("gate_proj", "gate_up_proj", "w1", "wi_0", "wi", "fc1", "gate", "up_proj", "intermediate.dense"):
        for kind in modules:
            if kind.endswith(ending):
                return kind
    return None


def _place_in_a_layer(kind: str) -> int:
    """Projections in the order in which a layer uses them, as far as their names tell."""
    order = ["q", "k", "v", "qkv", "o", "out", "wi_0", "gate", "gate_up", "w1", "fc1", "wi", "wi_1", "up", "w3",
             "down", "fc2", "wo"]  # fmt: skip
    name = kind.rpartition(".")[2].removesuffix("_proj")
    return order.index(name) if name in order else len(order)
