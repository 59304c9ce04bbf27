"""Which layers of a model are fused, for `kernels="fused"`."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from nalora.control.fused_ffn import fuse_ffn, fuse_product
from nalora.control.observer import GateObserver
from nalora.control.plan import Plan
from nalora.kernels.fused.factors import StepFactors
from nalora.kernels.fused.linears import fuse_adapters


def fuse(model: nn.Module, plan: Plan, observers: list[GateObserver], *, adapters: bool) -> list[Callable[[], None]]:
    """Fuse every FFN that allows it and, with `adapters`, every LoRA linear layer; what undoes it.

    Args:
        model: the model that the plan is of.
        plan: its blocks.
        observers: one for each block of the plan.
        adapters: whether adapters are fused into their layers, or only the product φ(z) ⊙ u.
    """
    factors = StepFactors()
    undo: list[Callable[[], None]] = []
    fused: set[nn.Module] = set()
    for each, observer in zip(plan.blocks, observers, strict=True):
        host = each.block.host
        if host is None:
            continue
        put_back = (
            fuse_ffn(host, each.block, observer, factors) if adapters else fuse_product(host, each.block, observer)
        )
        if put_back is not None:
            undo.append(put_back)
            fused |= {projection.module for projection in each.block.projections.values()}
    return undo + fuse_adapters(model, factors, frozenset(fused)) if adapters else undo
