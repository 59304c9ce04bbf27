"""Compute whole gated FFNs as single functions during training, with or without the statistics of their gates.

As in `kernels.fused.linears`, a call that the fused function would not compute identically runs the original forward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nalora.control.blocks import FFNBlock
from nalora.control.observer import GateObserver
from nalora.control.plan import Plan
from nalora.kernels.fused.adapters import StepFactors, adapters_of, frozen_weight, replace_forward
from nalora.kernels.fused.gated import GateSpec
from nalora.kernels.fused.linears import fuse_adapters, is_plain_call
from nalora.kernels.fused.lora_ffn import LoRAFFN, Weights
from nalora.kernels.fused.lora_linear import compute_dtype
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
    original = host.forward
    runs = triton_runs_on(next(host.parameters()).device)  # not read from the environment while a graph is traced

    @functools.wraps(original)
    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        compiling = torch.compiler.is_compiling()
        inside, outside = adapters_of(inner), adapters_of(outer)
        if (
            inside is None
            or outside is None
            or not is_plain_call(args, kwargs)
            or not (compiling or triton_runs_on(x.device))
        ):
            return original(x, *args, **kwargs)
        (a_gate, a_up), (b_gate, b_up), (a_down,), (b_down,) = *inside[:2], *outside[:2]
        if not a_gate.shape[0] == a_up.shape[0] == a_down.shape[0]:
            return original(x, *args, **kwargs)
        if compiling:
            return in_graph(x, *inner, *outer, spec) if in_graph and runs else original(x, *args, **kwargs)
        mask = sums = None
        if observer is not None:
            mask = as_bytes(observer.token_mask.of(x.shape[:-1]))
            sums = observer.sums_to_add_to(x.device) if host.training else None
        dtype = compute_dtype(x)
        step_factors = factors.get(inner, inside, dtype), factors.get(outer, outside, dtype)
        weights = Weights(*frozen, *inside.scalings, *outside.scalings, *step_factors)
        return LoRAFFN.apply(x, weights, spec, sums, mask, a_gate, b_gate, a_up, b_up, a_down, b_down)

    return replace_forward(host, forward)
