"""Fused linear layers as an operator of torch.library, which torch.compile keeps as one node of its graph.

The operator computes what `lora_linear.LoRALinears` does; its arguments and results are tensors and numbers alone.
Frozen layers are passed as the tensors that they store: the weight, or codes and the bits of their scales for FP8,
then the bias if there is one. The adapters are passed twice: cast, for the products, and as PEFT stores them, which get
the gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nalora.kernels.fused.adapters import Factors, adapters_of
from nalora.kernels.fused.frozen import DenseWeight, FrozenWeight
from nalora.kernels.fused.lora_linear import FrozenLinear, compute_dtype, in_shape, linears_backward, linears_forward
from nalora.kernels.fused.operators import cast_in_graph, define, differentiate


def compute(x: Tensor, layers: Sequence[nn.Module]) -> list[Tensor]:
    """Return the output of each LoRA layer, all of which have one plain adapter."""
    adapters = adapters_of(tuple(layers))
    assert adapters is not None
    dtype = compute_dtype(x)
    (factors,) = cast_in_graph((adapters,), dtype)
    frozen = [tensor for layer in layers for tensor in stored_tensors(layer.base_layer)]
    outputs: list[Tensor] = torch.ops.nalora.lora_linears(
        x.to(dtype), frozen, factors.a, list(factors.b), *(list(part) for part in adapters)
    )
    return outputs[:-1]


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


def _forward(
    x: Tensor,
    frozen: Sequence[Tensor],
    factor_a: Tensor,
    factors_b: Sequence[Tensor],
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    scalings: Sequence[float],
) -> list[Tensor]:
    """Return the outputs, then the projected input, which backward needs."""
    factors = Factors(factor_a, tuple(factors_b))
    outputs, projected = linears_forward(x.reshape(-1, x.shape[-1]), frozen_layers(frozen, scalings), factors)
    return [*(in_shape(y, x.shape) for y in outputs), projected]


def _forward_shapes(
    x: Tensor,
    frozen: Sequence[Tensor],
    factor_a: Tensor,
    factors_b: Sequence[Tensor],
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    scalings: Sequence[float],
) -> list[Tensor]:
    outputs = [x.new_empty(*x.shape[:-1], factor.shape[0]) for factor in factors_b]
    return [*outputs, x.new_empty(x.numel() // x.shape[-1], factor_a.shape[0])]


def _backward(
    grads: Sequence[Tensor],
    x: Tensor,
    projected: Tensor,
    factor_a: Tensor,
    factors_b: Sequence[Tensor],
    frozen: Sequence[Tensor],
    scalings: Sequence[float],
    dtype: torch.dtype,
    needs_dx: bool,
) -> list[Tensor]:
    """Return dx (empty unless needed), the stacked gradients of A, and those of each B, in the adapters' dtype."""
    rows = x.reshape(-1, x.shape[-1])
    dys = [dy.reshape(-1, dy.shape[-1]).to(x.dtype) for dy in grads]
    factors = Factors(factor_a, tuple(factors_b))
    dx, da, db = linears_backward(
        rows, projected, factors, frozen_layers(frozen, scalings), dys, factor_dtype=dtype, needs_dx=needs_dx
    )
    dx = x.new_empty(0) if dx is None else dx.view(x.shape)
    return [dx, da, *(grad for grad in db if grad is not None)]


def _backward_shapes(
    grads: Sequence[Tensor],
    x: Tensor,
    projected: Tensor,
    factor_a: Tensor,
    factors_b: Sequence[Tensor],
    frozen: Sequence[Tensor],
    scalings: Sequence[float],
    dtype: torch.dtype,
    needs_dx: bool,
) -> list[Tensor]:
    factors = (factor_a, *factors_b)
    return [x.new_empty(x.shape if needs_dx else 0), *(f.new_empty(f.shape, dtype=dtype) for f in factors)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, frozen, factor_a, factors_b, a, _, ctx.scalings = inputs
    ctx.save_for_backward(x, output[-1], factor_a, *factors_b, *frozen)
    ctx.count, ctx.dtype = len(a), a[0].dtype
    ctx.shapes = [y.shape for y in output[:-1]]
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    x, projected, factor_a, *others = ctx.saved_tensors
    factors_b, frozen = others[: ctx.count], others[ctx.count :]
    dys = [x.new_zeros(shape) if dy is None else dy for dy, shape in zip(grads[:-1], ctx.shapes, strict=True)]
    needs_dx = ctx.needs_input_grad[0]
    dx, stacked, *db = torch.ops.nalora.lora_linears_backward(
        dys, x, projected, factor_a, factors_b, frozen, ctx.scalings, ctx.dtype, needs_dx
    )
    da = list(stacked.split([factor.shape[1] for factor in factors_b]))
    nothing = [None] * len(frozen), None, [None] * len(factors_b)
    return dx if needs_dx else None, *nothing, da, db, None


define(
    "lora_linears(Tensor x, Tensor[] frozen, Tensor factor_a, Tensor[] factors_b, Tensor[] a, Tensor[] b,"
    " float[] scalings) -> Tensor[]",
    _forward,
    _forward_shapes,
)
define(
    "lora_linears_backward(Tensor[] grads, Tensor x, Tensor projected, Tensor factor_a, Tensor[] factors_b,"
    " Tensor[] frozen, float[] scalings, ScalarType dtype, bool needs_dx) -> Tensor[]",
    _backward,
    _backward_shapes,
)
differentiate("lora_linears", _differentiate, _save)
