"""Fused linear layers as an operator of torch.library, which torch.compile keeps as one node of its graph.

The operator computes what `lora_linear.LoRALinears` does; its arguments and results are tensors and numbers alone.
Frozen layers are passed as the tensors that they store: the weight, or codes and the bits of their scales for FP8,
then the bias if there is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nalora.kernels.fused.adapters import Adapters, Factors, adapters_of, cast
from nalora.kernels.fused.frozen import DenseWeight, FrozenWeight
from nalora.kernels.fused.lora_linear import FrozenLinear, compute_dtype, linears_backward, linears_forward


def compute(x: Tensor, layers: Sequence[nn.Module]) -> list[Tensor]:
    """Return the output of each LoRA layer, all of which have one plain adapter."""
    adapters = adapters_of(tuple(layers))
    assert adapters is not None
    a, b, scalings = adapters
    bases = [layer.base_layer for layer in layers]
    frozen = [tensor for base in bases for tensor in stored_tensors(base)]
    results = torch.ops.nalora.lora_linears(x.to(compute_dtype(x)), frozen, list(a), list(b), list(scalings))
    return results[: len(bases)]


def stored_tensors(base: nn.Module) -> list[Tensor]:
    """Return the tensors of a frozen layer: its weight, in one or two, and its bias."""
    names = ("codes", "scale_bits", "bias") if hasattr(base, "codes") else ("weight", "bias")
    return [tensor for name in names if (tensor := getattr(base, name)) is not None]


def is_stored_in_tensors(base: nn.Module) -> bool:
    """Return whether `stored_tensors` is the whole weight: not for one in 4 bits, whose state is an object."""
    return type(base) is nn.Linear or type(base).__name__ == "FP8Linear"


def frozen_layers(tensors: Sequence[Tensor], scalings: Sequence[float]) -> list[FrozenLinear]:
    """Return the layers that `stored_tensors` took apart."""
    layers: list[FrozenLinear] = []
    remaining = iter(tensors)
    for tensor in remaining:
        if tensor.dim() == 1:
            layers[-1] = layers[-1]._replace(bias=tensor)
        else:
            weight = _fp8(tensor, next(remaining)) if tensor.dtype is torch.uint8 else _dense(tensor)
            layers.append(FrozenLinear(weight, None, scalings[len(layers)]))
    return layers


def _dense(weight: Tensor) -> FrozenWeight:
    return DenseWeight(weight.to)


def _fp8(codes: Tensor, scale_bits: Tensor) -> FrozenWeight:
    from nalora.kernels.fused import fp8  # Triton may not be installed
    from nalora.kernels.fused.fp8_linear import FP8Weight

    return FP8Weight(lambda: fp8.Quantised(codes.view(fp8.CODES), scale_bits.view(torch.float32)))


@torch.library.custom_op("nalora::lora_linears", mutates_args=())
def lora_linears(
    x: Tensor,
    frozen: Sequence[Tensor],
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    scalings: Sequence[float],
) -> list[Tensor]:
    """Return the outputs, then what backward needs: the projected input, and the cast factors s·A and B."""
    (factors,) = cast([Adapters(tuple(a), tuple(b), tuple(scalings))], x.dtype)
    rows = x.reshape(-1, x.shape[-1])
    outputs, projected = linears_forward(rows, frozen_layers(frozen, scalings), factors)
    return [*(y.view(*x.shape[:-1], -1) for y in outputs), projected, factors.a, *factors.b]


@lora_linears.register_fake
def _(
    x: Tensor,
    frozen: Sequence[Tensor],
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    scalings: Sequence[float],
) -> list[Tensor]:
    rank = sum(factor.shape[0] for factor in a)
    tokens = x.numel() // x.shape[-1]
    outputs = [x.new_empty(*x.shape[:-1], factor.shape[0]) for factor in b]
    cast_factors = [x.new_empty(factor.shape) for factor in b]
    return [*outputs, x.new_empty(tokens, rank), x.new_empty(rank, x.shape[-1]), *cast_factors]


@torch.library.custom_op("nalora::lora_linears_backward", mutates_args=())
def lora_linears_backward(
    grads: Sequence[Tensor],
    x: Tensor,
    projected: Tensor,
    a: Tensor,
    b: Sequence[Tensor],
    frozen: Sequence[Tensor],
    scalings: Sequence[float],
    factor_dtype: torch.dtype,
    needs_dx: bool,
) -> list[Tensor]:
    """Return dx (empty unless needed), the stacked gradients of A, and those of each B."""
    rows = x.reshape(-1, x.shape[-1])
    dys = [dy.reshape(-1, dy.shape[-1]).to(x.dtype) for dy in grads]
    layers = frozen_layers(frozen, scalings)
    dx, da, db = linears_backward(
        rows, projected, Factors(a, tuple(b)), layers, dys, factor_dtype=factor_dtype, needs_dx=needs_dx
    )
    dx = x.new_empty(0) if dx is None else dx.view(x.shape)
    return [dx, da, *(grad for grad in db if grad is not None)]


@lora_linears_backward.register_fake
def _(
    grads: Sequence[Tensor],
    x: Tensor,
    projected: Tensor,
    a: Tensor,
    b: Sequence[Tensor],
    frozen: Sequence[Tensor],
    scalings: Sequence[float],
    factor_dtype: torch.dtype,
    needs_dx: bool,
) -> list[Tensor]:
    dx = x.new_empty(x.shape if needs_dx else 0)
    return [dx, a.new_empty(a.shape, dtype=factor_dtype), *(f.new_empty(f.shape, dtype=factor_dtype) for f in b)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, frozen, a, _, scalings = inputs
    count = len(a)
    ctx.save_for_backward(x, *output[count:], *frozen)
    ctx.count, ctx.scalings, ctx.factor_dtype = count, scalings, a[0].dtype
    ctx.shapes = [y.shape for y in output[:count]]
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    x, projected, a, *others = ctx.saved_tensors
    b, frozen = others[: ctx.count], others[ctx.count :]
    dys = [x.new_zeros(shape) if dy is None else dy for dy, shape in zip(grads[: ctx.count], ctx.shapes, strict=True)]
    needs_dx = ctx.needs_input_grad[0]
    dx, stacked, *db = torch.ops.nalora.lora_linears_backward(
        dys, x, projected, a, b, frozen, ctx.scalings, ctx.factor_dtype, needs_dx
    )
    da = list(stacked.split([factor.shape[1] for factor in b]))
    return dx if needs_dx else None, [None] * len(frozen), da, db, None


lora_linears.register_autograd(_backward, setup_context=_save)
