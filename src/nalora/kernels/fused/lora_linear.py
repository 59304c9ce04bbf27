"""Frozen linear layers with the same input and their LoRA adapters as one autograd function.

PEFT computes W x, then casts x to the adapter's float32, projects it, expands it, scales it and adds it: five passes
and two copies of x for each layer. Here the matrix product adds the frozen product to the low-rank term, layers that
share x (query, key and value) share their A-projection and the buffer of x's gradient, x is saved once in its own
dtype, and only A and B get gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nalora.kernels.fused.adapters import Factors
from nalora.kernels.fused.backward_pass import backward_pass
from nalora.kernels.fused.frozen import FrozenWeight, Rows, input_gradient
from nalora.kernels.fused.norm_outputs import saved_form


class FrozenLinear(NamedTuple):
    """The frozen weight and bias below a LoRA layer, and its LoRA scaling α/r."""

    weight: FrozenWeight
    bias: Tensor | None
    scaling: float


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype that a linear layer computes in for the input x, autocast included."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


def product_as(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Return left · right in the given dtype: float32 without rounding the product's sums, where the device can."""
    if left.is_cuda and dtype is torch.float32 and left.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(left, right, out_dtype=dtype)
    return (left @ right).to(dtype)


def in_shape(rows: Tensor, shape: Sequence[int]) -> Tensor:
    """Return rows [tokens, width] with the leading dimensions of a shape.

    The result is no view: autograd refuses to change a view that a function returned in place, as in `y += residual`.
    """
    if len(shape) == 2:
        return rows
    output: Tensor = torch.ops.aten._unsafe_view.default(rows, [*shape[:-1], rows.shape[-1]])
    return output


def scaled_rows(stacked: Tensor, ranks: Sequence[int], scalings: Sequence[float]) -> Tensor:
    """Return the stacked gradients of A from those of s·A, computed in place."""
    if len(set(scalings)) == 1:
        return stacked.mul_(scalings[0])
    torch._foreach_mul_(list(stacked.split(list(ranks))), list(scalings))
    return stacked


def linears_forward(rows: Tensor, layers: Sequence[FrozenLinear], factors: Factors) -> tuple[list[Tensor], Tensor]:
    """Return each layer's output for rows [tokens, in], and the rows projected by all s·A, [tokens, Σ rank]."""
    shared = Rows(rows)
    projected = rows @ factors.a.T
    outputs = []
    for low, b, layer in zip(_columns(projected, factors.b), factors.b, layers, strict=True):
        outputs.append(layer.weight.adapted_product(shared, low, b, layer.bias))
    return outputs, projected


def linears_backward(
    rows: Tensor,
    projected: Tensor,
    factors: Factors,
    layers: Sequence[FrozenLinear],
    grads: Sequence[Tensor | None],
    *,
    factor_dtype: torch.dtype,
    needs_dx: bool,
) -> tuple[Tensor | None, Tensor, list[Tensor | None]]:
    """Return dx, the gradients of all A, stacked, and that of each B; of None for an output that was not used."""
    through = torch.zeros_like(projected) if None in grads else torch.empty_like(projected)
    db: list[Tensor | None] = []
    columns = zip(_columns(through, factors.b), _columns(projected, factors.b), strict=True)
    for dy, (target, low), b in zip(grads, columns, factors.b, strict=True):
        if dy is not None:
            torch.mm(dy, b, out=target)
        db.append(None if dy is None else product_as(dy.T, low, factor_dtype))
    dx = input_gradient([layer.weight for layer in layers], grads, through, factors.a) if needs_dx else None
    ranks, scalings = [factor.shape[1] for factor in factors.b], [layer.scaling for layer in layers]
    da = scaled_rows(product_as(through.T, rows, factor_dtype), ranks, scalings)
    return dx, da, db


class LoRALinears(torch.autograd.Function):
    """yᵢ = x Wᵢᵀ + biasᵢ + (x (sᵢ Aᵢ)ᵀ) Bᵢᵀ for several layers, with gradients for x, Aᵢ and Bᵢ alone."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, layers: tuple[FrozenLinear, ...], factors: Factors, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        """Return each layer's output; save x or its source, its projections and the factors, none of an output's size.

        Args:
            ctx: the autograd context.
            x: the layers' input.
            layers: the frozen layers.
            factors: the adapters' factors in the dtype of computation.
            *parameters: A₁, B₁, A₂, B₂, …, which get the gradients.
        """
        rows = x.reshape(-1, x.shape[-1]).to(factors.a.dtype)
        outputs, projected = linears_forward(rows, layers, factors)
        source, ctx.rows_of = saved_form(x, rows)
        ctx.save_for_backward(source, projected, factors.a, *factors.b)
        ctx.set_materialize_grads(False)
        ctx.layers, ctx.shape, ctx.dtypes = layers, x.shape, (x.dtype, parameters[0].dtype)
        return tuple(in_shape(y, x.shape) for y in outputs)

    @staticmethod
    @backward_pass
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Tensor | None, ...]:
        """dx = Σ dyᵢ Wᵢ + (dyᵢ Bᵢ) sᵢ Aᵢ; dAᵢ = sᵢ (dyᵢ Bᵢ)ᵀ x; dBᵢ = dyᵢᵀ (x (sᵢ Aᵢ)ᵀ)."""
        source, projected, a, *b = ctx.saved_tensors
        x_dtype, factor_dtype = ctx.dtypes
        rows = ctx.rows_of(source)
        grads = [None if dy is None else dy.reshape(-1, dy.shape[-1]).to(rows.dtype) for dy in dys]
        dx, stacked, db = linears_backward(
            rows, projected, Factors(a, tuple(b)), ctx.layers, grads,
            factor_dtype=factor_dtype, needs_dx=ctx.needs_input_grad[0],
        )  # fmt: skip
        # An adapter whose output was not used has no gradient: weight decay leaves it alone then.
        pieces = stacked.split([factor.shape[1] for factor in b])
        da = [None if dy is None else piece for dy, piece in zip(dys, pieces, strict=True)]
        dx = None if dx is None else dx.view(ctx.shape).to(x_dtype)
        return dx, None, None, *(grad for pair in zip(da, db, strict=True) for grad in pair)


def _columns(projected: Tensor, b: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Split the projections of all layers into those of each layer, [tokens, rank]."""
    return projected.split([factor.shape[1] for factor in b], dim=1)
