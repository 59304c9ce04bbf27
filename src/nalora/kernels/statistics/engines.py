"""The choice of the engine that computes the statistics: the fastest one that this machine and this block support."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch

from nalora.activations import Activation
from nalora.kernels.statistics import reference

Accumulate = Callable[..., None]

# Compiling takes 5 s once, and saves 3 ns for each element of z on two cores. With this many gate channels in a model
# and 1,024 tokens in a step it pays off within 200 steps; a model with fewer uses the reference. The rule depends on
# the model's size alone, so that a resumed run always uses the engine it was started with.
_CHANNELS_WORTH_COMPILING = 8192


class Engine(NamedTuple):
    """An engine's name and its `accumulate`, with the signature of `reference.accumulate`."""

    name: str
    accumulate: Accumulate


def choose(
    activation: Activation, device: torch.device, dtype: torch.dtype, *, kernels: str, channels: int = 0
) -> Engine:
    """Return Triton on a GPU for its activations, else the compiled engine if there is a compiler, else the reference.

    Args:
        activation: the activation of the block's gate.
        device: the device of the block's statistics.
        dtype: their precision; float64 always gets the reference, which is exact.
        kernels: ``"off"`` always gets the reference.
        channels: the gate channels of the whole model, which decide whether compiling pays off.
    """
    if device.type == "meta":  # a plan without weights: return what this machine would use
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if kernels == "off" or dtype != torch.float32:
        return Engine("reference", reference.accumulate)
    if device.type == "cuda" and has_triton():
        from nalora.kernels.statistics import triton_activations, triton_engine

        if triton_activations.number_and_limit(activation) is not None:
            return Engine("triton", triton_engine.accumulate)
    if channels >= _CHANNELS_WORTH_COMPILING and can_compile(device):
        from nalora.kernels.statistics import compiled

        return Engine("compiled", compiled.accumulate)
    return Engine("reference", reference.accumulate)


def triton_runs_on(device: torch.device) -> bool:
    """Return whether Triton's kernels run on this device: a GPU, or any in its interpreter."""
    return device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"


def can_compile(device: torch.device) -> bool:
    """Return whether torch.compile can generate code for this device."""
    return (device.type == "cuda" and has_triton()) or (device.type == "cpu" and _has_cpp_compiler())


def has_triton() -> bool:
    """Return whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _has_cpp_compiler() -> bool:
    """Return whether torch's default compiler is on the path; torch's own check takes an import of seconds."""
    default = {"win32": "cl", "darwin": "clang++"}.get(sys.platform, "g++")
    return shutil.which(os.environ.get("CXX", default)) is not None
