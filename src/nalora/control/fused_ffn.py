"""Compute whole gated FFNs as single functions during training, with or without the statistics of their gates.

As in `kernels.fused.linears`, a call that the fused function would not compute identically runs the original forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nalora.control.blocks import FFNBlock
from nalora.control.observer import GateObserver
from nalora.control.plan import Plan
from nalora.kernels.fused.adapters import StepFactors, adapters_of, frozen_weight
from nalora.kernels.fused.frozen import FrozenWeight
from nalora.kernels.fused.gated import GateSpec
from nalora.kernels.fused.linears import fuse_adapters, is_plain_call
from nalora.kernels.fused.lora_ffn import LoRAFFN, Weights
from nalora.kernels.fused.lora_linear import compute_dtype
from nalora.kernels.fused.replaced_forward import Replacement, replace_forward
from nalora.kernels.statistics.engines import triton_runs_on
from nalora.kernels.statistics.triton_activations import number_and_limit
from nalora.kernels.statistics.triton_engine import as_bytes


def fuse(model: nn.Module, plan: Plan, observers: Sequence[object]) -> list[Callable[[], None]]:
    """Fuse every FFN of a plan and every other LoRA linear layer where possible; the functions returned undo it.

    `observers` has one entry for each block of the plan.
    """
    factors = StepFactors()
    undo: list[Callable[[], None]] = []
    fused: set[nn.Module] = set()
    for planned, observer in zip(plan.blocks, observers, strict=True):
        if not isinstance(observer, GateObserver):
            continue
        if (restore := fuse_ffn(planned.block, factors, observer)) is not None:
            undo.append(restore)
            fused |= {projection.module for projection in planned.block.projections.values()}
    return undo + fuse_adapters(model, factors, frozenset(fused))


# Computes gate, up and down inside a compiled graph.
InGraph = Callable[[Tensor, nn.Module, nn.Module, nn.Module, GateSpec], Tensor]


def fuse_ffn(
    block: FFNBlock, factors: StepFactors, observer: GateObserver | None = None, in_graph: InGraph | None = None
) -> Callable[[], None] | None:
    """Compute a whole gated FFN as one function; return what restores the module's forward, None if impossible.

    Args:
        block: the FFN.
        factors: where its adapters are cast.
        observer: of its gate, if statistics are collected.
        in_graph: computes it under torch.compile, where it keeps its own forward without it.
    """
    host, known = block.host, number_and_limit(block.activation)
    if host is None or known is None or block.up is None or block.fused:
        return None
    inner, outer = (block.gate.module, block.up.module), (block.down.module,)
    frozen = [frozen_weight(layer) for layer in (*inner, *outer)]
    if None in frozen or any(layer.base_layer.bias is not None for layer in (*inner, *outer)):
        return None
    thresholds, with_up = (observer.thresholds, observer.with_up) if observer else ((0.0, 0.0), False)
    spec = GateSpec(*known, *thresholds, block.up_offset, with_up)
    factors.groups += [inner, outer]
    return replace_forward(host, _FusedFFN(inner, outer, frozen, spec, factors, observer, in_graph))


class _FusedFFN(Replacement):
    """Computes one FFN, where its adapters allow it."""

    def __init__(
        self,
        inner: tuple[nn.Module, nn.Module],
        outer: tuple[nn.Module],
        frozen: list[FrozenWeight],
        spec: GateSpec,
        factors: StepFactors,
        observer: GateObserver | None,
        in_graph: InGraph | None,
    ) -> None:
        self.inner, self.outer, self.frozen, self.spec = inner, outer, frozen, spec
        self.factors, self.observer, self.in_graph = factors, observer, in_graph
        # Not read from the environment while a graph is traced.
        self.can_be_in_graph = in_graph is not None and triton_runs_on(next(inner[0].parameters()).device)

    def compute(self, host: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the output."""
        compiling = torch.compiler.is_compiling()
        inside, outside = adapters_of(self.inner), adapters_of(self.outer)
        if (
            inside is None
            or outside is None
            or not is_plain_call(args, kwargs)
            or not (self.can_be_in_graph if compiling else triton_runs_on(x.device))
        ):
            return self.original(host, x, *args, **kwargs)
        (a_gate, a_up), (b_gate, b_up), (a_down,), (b_down,) = *inside[:2], *outside[:2]
        if not a_gate.shape[0] == a_up.shape[0] == a_down.shape[0]:
            return self.original(host, x, *args, **kwargs)
        if compiling:
            return self.in_graph(x, *self.inner, *self.outer, self.spec)
        mask = sums = None
        if self.observer is not None:
            mask = as_bytes(self.observer.token_mask.of(x.shape[:-1]))
            sums = self.observer.sums_to_add_to(x.device) if host.training else None
        dtype = compute_dtype(x)
        step_factors = self.factors.get(self.inner, inside, dtype), self.factors.get(self.outer, outside, dtype)
        weights = Weights(*self.frozen, *inside.scalings, *outside.scalings, *step_factors)
        return LoRAFFN.apply(x, weights, self.spec, sums, mask, a_gate, b_gate, a_up, b_up, a_down, b_down)
