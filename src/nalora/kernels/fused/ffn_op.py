"""A gated FFN with its adapters as an operator of torch.library, which torch.compile keeps as one node of its graph.

The operator computes what `lora_ffn.LoRAFFN` does, and adds to the same statistics; see `linears_op` for its arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nalora.kernels.fused.adapters import Factors, adapters_of
from nalora.kernels.fused.collectors import collector_of
from nalora.kernels.fused.gated import GateSpec
from nalora.kernels.fused.linears_op import frozen_layers, stored_tensors
from nalora.kernels.fused.lora_ffn import Saved, Weights, ffn_backward, ffn_forward
from nalora.kernels.fused.lora_linear import compute_dtype, in_shape
from nalora.kernels.fused.operators import cast_in_graph, define, differentiate
from nalora.kernels.statistics.triton_engine import as_bytes


def compute(
    x: Tensor, gate: nn.Module, up: nn.Module, down: nn.Module, spec: GateSpec, statistics: Tensor | None = None
) -> Tensor:
    """Return the output of an FFN whose three LoRA layers have one plain adapter of the same rank each.

    `statistics` is the key of what collects those of the gate.
    """
    inner, outer = adapters_of((gate, up)), adapters_of((down,))
    assert inner is not None
    assert outer is not None
    dtype = compute_dtype(x)
    of_inner, of_outer = cast_in_graph((inner, outer), dtype)
    factors = [of_inner.a, *of_inner.b, of_outer.a, *of_outer.b]
    frozen = [tensor for layer in (gate, up, down) for tensor in stored_tensors(layer.base_layer)]
    output: Tensor = torch.ops.nalora.lora_ffn(
        x.to(dtype), frozen, factors, *([*one, *other] for one, other in zip(inner, outer, strict=True)),
        spec.number, spec.limit, spec.up_offset, statistics,
    )[0]  # fmt: skip
    return output


def _weights(frozen: Sequence[Tensor], factors: Sequence[Tensor], scalings: Sequence[float]) -> Weights:
    a_both, b_gate, b_up, a_down, b_down = factors
    weights = (layer.weight for layer in frozen_layers(frozen, scalings))
    return Weights(*weights, *scalings, Factors(a_both, (b_gate, b_up)), Factors(a_down, (b_down,)))


def _forward(
    x: Tensor,
    frozen: Sequence[Tensor],
    factors: Sequence[Tensor],
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    scalings: Sequence[float],
    number: int,
    limit: float,
    up_offset: float,
    statistics: Tensor | None,
) -> list[Tensor]:
    """Return the output, then `Saved`, which backward needs."""
    spec, sums, mask = GateSpec(number, limit, 0.0, 0.0, up_offset, False), None, None
    collector = collector_of(statistics)
    if collector is not None:
        spec = GateSpec(number, limit, *collector.thresholds, up_offset, collector.with_up)
        sums, mask = collector.begin_pass(x.shape[:-1], x.device)
    rows = x.reshape(-1, x.shape[-1])
    y, saved = ffn_forward(rows, _weights(frozen, factors, scalings), spec, sums, as_bytes(mask))
    return [in_shape(y, x.shape), *saved]


def _forward_shapes(
    x: Tensor,
    frozen: Sequence[Tensor],
    factors: Sequence[Tensor],
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    scalings: Sequence[float],
    number: int,
    limit: float,
    up_offset: float,
    statistics: Tensor | None,
) -> list[Tensor]:
    tokens, rank, width = x.numel() // x.shape[-1], a[0].shape[0], b[0].shape[0]
    saved = [x.new_empty(tokens, columns) for columns in (width, width, 2 * rank, rank)]
    return [x.new_empty(x.shape), *saved]


def _backward(
    dy: Tensor,
    x: Tensor,
    saved: Sequence[Tensor],
    factors: Sequence[Tensor],
    frozen: Sequence[Tensor],
    scalings: Sequence[float],
    number: int,
    limit: float,
    up_offset: float,
    dtype: torch.dtype,
    needs_dx: bool,
) -> list[Tensor]:
    """Return dx (empty unless needed) and the gradients of the factors: A of gate and up, stacked, then the others."""
    dx, *grads = ffn_backward(
        dy.reshape(-1, dy.shape[-1]).to(x.dtype), x.reshape(-1, x.shape[-1]), Saved(*saved),
        _weights(frozen, factors, scalings), GateSpec(number, limit, 0.0, 0.0, up_offset, False),
        dtype=dtype, needs_dx=needs_dx,
    )  # fmt: skip
    # The kernel writes gradients of B transposed.
    return [x.new_empty(0) if dx is None else dx.view(x.shape), *(grad.contiguous() for grad in grads)]


def _backward_shapes(
    dy: Tensor,
    x: Tensor,
    saved: Sequence[Tensor],
    factors: Sequence[Tensor],
    frozen: Sequence[Tensor],
    scalings: Sequence[float],
    number: int,
    limit: float,
    up_offset: float,
    dtype: torch.dtype,
    needs_dx: bool,
) -> list[Tensor]:
    dx = x.new_empty(x.shape if needs_dx else 0)
    return [dx, *(factor.new_empty(factor.shape, dtype=dtype) for factor in factors)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, frozen, factors, a, _, ctx.scalings, *ctx.spec, _ = inputs
    ctx.save_for_backward(x, *output[1:], *factors, *frozen)
    ctx.dtype = a[0].dtype
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    x, *others = ctx.saved_tensors
    saved, factors, frozen = others[:4], others[4:9], others[9:]
    needs_dx = ctx.needs_input_grad[0]
    dy = x.new_zeros(x.shape) if grads[0] is None else grads[0]
    dx, a_both, b_gate, b_up, a_down, b_down = torch.ops.nalora.lora_ffn_backward(
        dy, x, saved, factors, frozen, ctx.scalings, *ctx.spec, ctx.dtype, needs_dx
    )
    of_adapters = [*a_both.chunk(2), a_down], [b_gate, b_up, b_down]
    nothing = [None] * len(frozen), [None] * len(factors)
    return dx if needs_dx else None, *nothing, *of_adapters, *(None,) * 5


define(
    "lora_ffn(Tensor x, Tensor[] frozen, Tensor[] factors, Tensor[] a, Tensor[] b, float[] scalings, int number,"
    " float limit, float up_offset, Tensor? statistics) -> Tensor[]",
    _forward,
    _forward_shapes,
)
define(
    "lora_ffn_backward(Tensor dy, Tensor x, Tensor[] saved, Tensor[] factors, Tensor[] frozen, float[] scalings,"
    " int number, float limit, float up_offset, ScalarType dtype, bool needs_dx) -> Tensor[]",
    _backward,
    _backward_shapes,
)
differentiate("lora_ffn", _differentiate, _save)
