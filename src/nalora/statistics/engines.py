"""Which engine computes the statistics: the fastest that this machine and this block allow."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import NamedTuple

import torch

from nalora.activations import Activation
from nalora.statistics import reference

Accumulate = Callable[..., None]


class Engine(NamedTuple):
    """An engine by name, with its `accumulate` of the signature that `nalora.statistics.reference` documents."""

    name: str
    accumulate: Accumulate


def choose(activation: Activation, device: torch.device, dtype: torch.dtype, *, kernels: str) -> Engine:
    """Triton on a GPU for the activations it knows, else the reference; ``kernels="off"`` is always the reference."""
    if device.type == "meta":  # a plan without weights: what this machine would choose
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if kernels != "off" and device.type == "cuda" and dtype == torch.float32 and _has_triton():
        from nalora.statistics import triton_activations, triton_engine

        if triton_activations.number_and_limit(activation) is not None:
            return Engine("triton", triton_engine.accumulate)
    return Engine("reference", reference.accumulate)


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
