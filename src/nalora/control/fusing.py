"""Which layers of a model are fused, for `kernels="fused"`."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from nalora.control.fused_ffn import fuse_ffn
from nalora.control.observer import GateObserver
from nalora.control.plan import Plan
from nalora.kernels.fused.factors import StepFactors
from nalora.kernels.fused.linears import fuse_adapters


def fuse(model: nn.Module, plan: Plan, observers: list[GateObserver]) -> list[Callable[[], None]]:
    """Fuse every FFN and every other LoRA linear layer that allows it; what undoes it.

    Args:
        model: the model that the plan is of.
        plan: its blocks.
        observers: one for each block of the plan.
    """
    factors = StepFactors()
    undo: list[Callable[[], None]] = []
    fused: set[nn.Module] = set()
    for planned, observer in zip(plan.blocks, observers, strict=True):
        host = planned.block.host
        put_back = None if host is None else fuse_ffn(host, planned.block, observer, factors)
        if put_back is not None:
            undo.append(put_back)
            fused |= {projection.module for projection in planned.block.projections.values()}
    return undo + fuse_adapters(model, factors, frozenset(fused))
