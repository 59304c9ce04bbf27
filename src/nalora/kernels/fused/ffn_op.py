"""A gated FFN with its adapters as an operator of torch.library, which torch.compile keeps as one node of its graph.

The operator computes what `lora_ffn.LoRAFFN` does without statistics; see `linears_op` for its arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nalora.kernels.fused.adapters import Adapters, Factors, adapters_of, cast
from nalora.kernels.fused.gated import GateSpec
from nalora.kernels.fused.linears_op import frozen_layers, stored_tensors
from nalora.kernels.fused.lora_ffn import Saved, Weights, ffn_backward, ffn_forward
from nalora.kernels.fused.lora_linear import compute_dtype


def compute(x: Tensor, gate: nn.Module, up: nn.Module, down: nn.Module, spec: GateSpec) -> Tensor:
    """Return the output of an FFN whose three LoRA layers have one plain adapter of the same rank each."""
    adapters = adapters_of((gate, up, down))
    assert adapters is not None
    a, b, scalings = adapters
    frozen = [tensor for layer in (gate, up, down) for tensor in stored_tensors(layer.base_layer)]
    output: Tensor = torch.ops.nalora.lora_ffn(
        x.to(compute_dtype(x)), frozen, list(a), list(b), list(scalings), spec.number, spec.limit, spec.up_offset
    )[0]
    return output


def _spec(number: int, limit: float, up_offset: float) -> GateSpec:
    return GateSpec(number, limit, 0.0, 0.0, up_offset, False)


@torch.library.custom_op("nalora::lora_ffn", mutates_args=())
def lora_ffn(
    x: Tensor,
    frozen: Sequence[Tensor],
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    scalings: Sequence[float],
    number: int,
    limit: float,
    up_offset: float,
) -> list[Tensor]:
    """Return the output, then what backward needs: `Saved`, and the cast factors of gate and up and of down."""
    groups = [Adapters(*(tuple(of[part]) for of in (a, b, scalings))) for part in (slice(2), slice(2, 3))]
    inner, outer = cast(groups, x.dtype)
    whole = Weights(*(layer.weight for layer in frozen_layers(frozen, scalings)), *scalings, inner, outer)
    y, saved = ffn_forward(x.reshape(-1, x.shape[-1]), whole, _spec(number, limit, up_offset))
    return [y.view(x.shape), *saved, inner.a, *inner.b, outer.a, *outer.b]


@lora_ffn.register_fake
def _(
    x: Tensor,
    frozen: Sequence[Tensor],
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    scalings: Sequence[float],
    number: int,
    limit: float,
    up_offset: float,
) -> list[Tensor]:
    tokens, rank, width = x.numel() // x.shape[-1], a[0].shape[0], b[0].shape[0]
    saved = [x.new_empty(tokens, columns) for columns in (width, width, 2 * rank, rank)]
    factors = [x.new_empty(2 * rank, x.shape[-1]), *(x.new_empty(factor.shape) for factor in (b[0], b[1], a[2], b[2]))]
    return [x.new_empty(x.shape), *saved, *factors]


@torch.library.custom_op("nalora::lora_ffn_backward", mutates_args=())
def lora_ffn_backward(
    dy: Tensor,
    x: Tensor,
    saved: Sequence[Tensor],
    factors: Sequence[Tensor],
    frozen: Sequence[Tensor],
    scalings: Sequence[float],
    number: int,
    limit: float,
    up_offset: float,
    factor_dtype: torch.dtype,
    needs_dx: bool,
) -> list[Tensor]:
    """Return dx (empty unless needed), the stacked gradients of A of gate and up, and those of the other factors."""
    a_both, b_gate, b_up, a_down, b_down = factors
    whole = Weights(
        *(layer.weight for layer in frozen_layers(frozen, scalings)),
        *scalings,
        Factors(a_both, (b_gate, b_up)),
        Factors(a_down, (b_down,)),
    )
    dx, *grads = ffn_backward(
        dy.reshape(-1, dy.shape[-1]).to(x.dtype), x.reshape(-1, x.shape[-1]), Saved(*saved), whole,
        _spec(number, limit, up_offset), dtype=factor_dtype, needs_dx=needs_dx,
    )  # fmt: skip
    # The kernel writes gradients of B transposed.
    return [x.new_empty(0) if dx is None else dx.view(x.shape), *(grad.contiguous() for grad in grads)]


@lora_ffn_backward.register_fake
def _(
    dy: Tensor,
    x: Tensor,
    saved: Sequence[Tensor],
    factors: Sequence[Tensor],
    frozen: Sequence[Tensor],
    scalings: Sequence[float],
    number: int,
    limit: float,
    up_offset: float,
    factor_dtype: torch.dtype,
    needs_dx: bool,
) -> list[Tensor]:
    dx = x.new_empty(x.shape if needs_dx else 0)
    return [dx, *(factor.new_empty(factor.shape, dtype=factor_dtype) for factor in factors)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, frozen, a, _, ctx.scalings, *ctx.spec = inputs
    ctx.save_for_backward(x, *output[1:], *frozen)
    ctx.factor_dtype = a[0].dtype
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    x, *others = ctx.saved_tensors
    saved, factors, frozen = others[:4], others[4:9], others[9:]
    needs_dx = ctx.needs_input_grad[0]
    dy = x.new_zeros(x.shape) if grads[0] is None else grads[0]
    dx, a_both, b_gate, b_up, a_down, b_down = torch.ops.nalora.lora_ffn_backward(
        dy, x, saved, factors, frozen, ctx.scalings, *ctx.spec, ctx.factor_dtype, needs_dx
    )
    a_gate, a_up = a_both.chunk(2)
    grads_of_factors = [a_gate, a_up, a_down], [b_gate, b_up, b_down]
    return dx if needs_dx else None, [None] * len(frozen), *grads_of_factors, None, None, None, None


lora_ffn.register_autograd(_backward, setup_context=_save)
