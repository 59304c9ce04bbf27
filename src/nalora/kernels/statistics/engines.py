"""Which engine computes the statistics: the fastest that this machine and this block allow."""

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
# and 1,024 tokens in a step that is paid back within 200 steps; a model with fewer keeps the reference. The rule asks
# for the model's size alone, so that a resumed run is always computed by the engine it was begun with.
_CHANNELS_WORTH_COMPILING = 8192


class Engine(NamedTuple):
    """An engine by name, with its `accumulate` of the signature that `reference` documents."""

    name: str
    accumulate: Accumulate


def choose(
    activation: Activation, device: torch.device, dtype: torch.dtype, *, kernels: str, channels: int = 0
) -> Engine:
    """Triton on a GPU for the activations it knows, else compiled where a compiler is there, else the reference.

    Args:
        activation: what follows the block's gate.
        device: where the block's statistics are kept.
        dtype: their precision; float64, asked for where exactness is, gets the reference.
        kernels: ``"off"`` is always the reference.
        channels: the gate channels of the whole model, which say whether compiling is worth its time.
    """
    if device.type == "meta":  # a plan without weights: what this machine would choose
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if kernels == "off" or dtype != torch.float32:
        return Engine("reference", reference.accumulate)
    if device.type == "cuda" and _has_triton():
        from nalora.kernels.statistics import triton_activations, triton_engine

        if triton_activations.number_and_limit(activation) is not None:
            return Engine("triton", triton_engine.accumulate)
    if channels >= _CHANNELS_WORTH_COMPILING and _can_compile(device):
        from nalora.kernels.statistics import compiled

        return Engine("compiled", compiled.accumulate)
    return Engine("reference", reference.accumulate)


def _can_compile(device: torch.device) -> bool:
    return (device.type == "cuda" and _has_triton()) or (device.type == "cpu" and _has_cpp_compiler())


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _has_cpp_compiler() -> bool:
    """Whether the compiler that torch would call is on the path; asking torch itself takes an import of seconds."""
    default = {"win32": "cl", "darwin": "clang++"}.get(sys.platform, "g++")
    return shutil.which(os.environ.get("CXX", default)) is not None
