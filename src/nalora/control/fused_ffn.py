"""Compute whole gated FFNs as single functions during training, with or without the statistics of their gates.

As in `kernels.fused.linears`, a call that the fused function would not compute identically runs the original forward.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nalora.control.blocks import FFNBlock
from nalora.control.fusable import refuse_unless_observable, why_not_one_function
from nalora.control.observer import GateObserver
from nalora.control.plain_ffn import outside_of
from nalora.control.plan import Plan
from nalora.kernels.fused import ffn_op, linears_op
from nalora.kernels.fused.adapters import StepFactors, adapters_of, frozen_weight, is_usable
from nalora.kernels.fused.collectors import key_of
from nalora.kernels.fused.compiled_layers import compile_layers
from nalora.kernels.fused.gated import GateSpec
from nalora.kernels.fused.graphed_layers import graph_layers
from nalora.kernels.fused.layer_recording import PassState, Watched
from nalora.kernels.fused.linears import fuse_adapters
from nalora.kernels.fused.lora_ffn import LoRAFFN, Weights
from nalora.kernels.fused.lora_linear import compute_dtype
from nalora.kernels.fused.replaced_forward import all_or_nothing, replace_forward
from nalora.kernels.statistics.engines import triton_runs_on
from nalora.kernels.statistics.triton_activations import number_and_limit
from nalora.kernels.statistics.triton_engine import as_bytes


def fuse(
    model: nn.Module, plan: Plan, observers: Sequence[object], *, compiled: bool = False, graphed: bool = False
) -> list[Callable[[], None]]:
    """Fuse every FFN of a plan and every other LoRA linear layer where possible; the functions returned undo it.

    Args:
        model: with PEFT's adapters.
        plan: of the model.
        observers: one for each block of the plan.
        compiled: whether torch.compile also compiles the decoder layers.
        graphed: whether the decoder layers are replayed from CUDA graphs.

    Raises:
        NALoRAError: `compiled` or `graphed`, and a gate that could not be observed inside such a layer.
    """
    if compiled or graphed:
        refuse_unless_observable(model, plan, graphed=graphed)
    with all_or_nothing(model):
        return _replace_forwards(model, plan, observers, compiled=compiled, graphed=graphed)


def _replace_forwards(
    model: nn.Module, plan: Plan, observers: Sequence[object], *, compiled: bool, graphed: bool
) -> list[Callable[[], None]]:
    factors = StepFactors()
    undo: list[Callable[[], None]] = []
    fused: set[nn.Module] = set()
    for planned, observer in zip(plan.blocks, observers, strict=True):
        if not isinstance(observer, GateObserver):
            continue
        if (restore := fuse_ffn(planned.block, factors, observer, in_graph=compiled)) is not None:
            undo.append(restore)
            fused |= {projection.module for projection in planned.block.projections.values()}
    undo += fuse_adapters(model, factors, frozenset(fused), linears_op.compute if compiled else None)
    if compiled:
        undo = compile_layers(model) + undo
    return graph_layers(model, factors) + undo if graphed else undo


def fuse_ffn(
    block: FFNBlock, factors: StepFactors, observer: GateObserver | None = None, *, in_graph: bool = False
) -> Callable[[], None] | None:
    """Compute a whole gated FFN as one function; return what restores the module's forward, None if impossible.

    Args:
        block: the FFN.
        factors: where its adapters are cast.
        observer: of its gate, if statistics are collected.
        in_graph: whether it is an operator under torch.compile, where it keeps its own forward otherwise.
    """
    known = number_and_limit(block.activation)
    if block.host is None or known is None or why_not_one_function(block):
        return None
    thresholds, with_up = (observer.thresholds, observer.with_up) if observer else ((0.0, 0.0), False)
    ffn = _FusedFFN(block, GateSpec(*known, *thresholds, block.up_offset, with_up), factors, observer, in_graph)
    return replace_forward(block.host, ffn)


class _FusedFFN(Watched):
    """Computes one FFN, where its adapters allow it."""

    def __init__(
        self, block: FFNBlock, spec: GateSpec, factors: StepFactors, observer: GateObserver | None, in_graph: bool
    ) -> None:
        assert block.up is not None
        assert block.host is not None
        self.inner, self.outer = (block.gate.module, block.up.module), (block.down.module,)
        self.frozen = [frozen_weight(layer) for layer in (*self.inner, *self.outer)]
        self.spec, self.factors, self.observer = spec, factors, observer
        self.bases = [layer.base_layer for layer in (*self.inner, *self.outer)]
        factors.groups += [self.inner, self.outer]
        projections = {*self.inner, *self.outer}
        others = [module for _, module in outside_of(block.host, projections)]
        self.children = [(module._modules, [*module._modules.values()]) for module in others if module._modules]
        self.dropouts = [module for module in others if isinstance(module, nn.modules.dropout._DropoutNd)]
        self.argument = [*inspect.signature(type(block.host).forward).parameters, "", ""][1]
        # Not read from the environment while a graph is traced.
        self.in_graph = in_graph and triton_runs_on(next(self.inner[0].parameters()).device)
        # It collects the statistics of a compiled graph (`collectors.Collector`).
        self.thresholds, self.with_up = (spec.lower, spec.upper), spec.utility
        self.key = key_of(self) if in_graph and observer is not None else None

    def compute(self, host: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Return the output."""
        compiling = torch.compiler.is_compiling()
        x = args[0] if args else kwargs.get(self.argument)
        inside, outside = adapters_of(self.inner), adapters_of(self.outer)
        if (
            inside is None
            or outside is None
            or len(args) + len(kwargs) != 1
            or not isinstance(x, Tensor)
            or not torch.is_grad_enabled()
            or not (self.in_graph if compiling else triton_runs_on(x.device) and x.numel() and self.is_as_it_was())
            or any(dropout.p for dropout in self.dropouts)
            or not all(map(is_usable, self.bases))
        ):
            return self.original(host, *args, **kwargs)
        (a_gate, a_up), (b_gate, b_up), (a_down,), (b_down,) = *inside[:2], *outside[:2]
        if not a_gate.shape[0] == a_up.shape[0] == a_down.shape[0]:
            return self.original(host, *args, **kwargs)
        if compiling:
            return ffn_op.compute(x, *self.inner, *self.outer, self.spec, self.key if host.training else None)
        mask = sums = None
        if self.observer is not None and host.training:
            sums, mask = self.begin_pass(x.shape[:-1], x.device)
        dtype = compute_dtype(x)
        step_factors = self.factors.get(self.inner, inside, dtype), self.factors.get(self.outer, outside, dtype)
        weights = Weights(*self.frozen, *inside.scalings, *outside.scalings, *step_factors)
        return LoRAFFN.apply(x, weights, self.spec, sums, as_bytes(mask), a_gate, b_gate, a_up, b_up, a_down, b_down)

    def is_as_it_was(self) -> bool:
        """Return whether the FFN still consists of the same modules: `unload` puts others in their place."""
        layers = (*self.inner, *self.outer)
        return all([*modules.values()] == children for modules, children in self.children) and all(
            layer._modules["base_layer"] is base for layer, base in zip(layers, self.bases, strict=True)
        )

    def is_observed(self) -> bool:
        """Return whether statistics of the gate are collected."""
        return self.observer is not None

    def decide(self, x: Tensor) -> PassState:
        """Decide whether a pass with this input counts."""
        assert self.observer is not None
        return self.observer.begin_pass(x.shape[:-1], x.device)

    def begin_pass(self, shape: torch.Size, device: torch.device) -> PassState:
        """Return what was decided for a pass with an input of this shape; decide it unless somebody else has."""
        assert self.observer is not None
        if self.fixed is None:
            self.seen = self.observer.begin_pass(shape, device)
        return self.fixed or self.seen

    def addresses(self) -> tuple[int, ...]:
        """Return where the statistics are."""
        return tuple(tensor.data_ptr() for tensor in self.observer.window.sums) if self.observer else ()
