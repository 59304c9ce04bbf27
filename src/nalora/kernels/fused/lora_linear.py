"""Frozen linear layers of one input, with their LoRA adapters, as one autograd function.

PEFT computes W x, then casts x to the adapter's float32, projects it, expands it, scales it and adds it: five passes
and two copies of x for each layer. Here the frozen product is added to the low-rank term by the matrix product
itself, layers that share x (query, key and value) share their A-projection and the buffer of x's gradient, x is kept
once in its own dtype, and only A and B get gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nalora.kernels.fused.factors import Factors
from nalora.kernels.fused.peft_layers import Weight


class FrozenLinear(NamedTuple):
    """What a LoRA layer adds to: a weight and perhaps a bias that do not learn, and the LoRA scaling α/r."""

    weight: Weight
    bias: Tensor | None
    scaling: float


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype that a linear layer would compute in here."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


def product_as(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """left · right in another dtype: float32 straight from the product's own sums, where the device can."""
    if left.is_cuda and dtype is torch.float32 and left.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(left, right, out_dtype=dtype)
    return (left @ right).to(dtype)


def scaled_rows(stacked: Tensor, ranks: Sequence[int], scalings: Sequence[float]) -> tuple[Tensor, ...]:
    """The gradients of A from those of s·A, in place."""
    pieces = stacked.split(list(ranks))
    if len(set(scalings)) == 1:
        stacked.mul_(scalings[0])
    else:
        torch._foreach_mul_(list(pieces), list(scalings))
    return pieces


class LoRALinears(torch.autograd.Function):
    """yᵢ = x Wᵢᵀ + biasᵢ + (x (sᵢ Aᵢ)ᵀ) Bᵢᵀ for several layers, with gradients for x, Aᵢ and Bᵢ alone."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, layers: tuple[FrozenLinear, ...], made: Factors, *factors: Tensor
    ) -> tuple[Tensor, ...]:
        """Save x, its projections and the factors, nothing of an output's size.

        Args:
            ctx: autograd's.
            x: the layers' input.
            layers: what is frozen.
            made: the factors as they are computed with.
            *factors: A₁, B₁, A₂, B₂, …, which get the gradients.
        """
        dtype = made.a.dtype
        rows = x.reshape(-1, x.shape[-1]).to(dtype)
        projected = rows @ made.a.T
        outputs = []
        for low, b, layer in zip(_columns(projected, made.b), made.b, layers, strict=True):
            y = low @ b.T if layer.bias is None else torch.addmm(layer.bias.to(dtype), low, b.T)
            outputs.append(y.addmm_(rows, layer.weight(dtype).T).view(*x.shape[:-1], -1))
        ctx.save_for_backward(rows, projected, made.a, *made.b)
        ctx.set_materialize_grads(False)
        ctx.layers, ctx.shape, ctx.dtypes = layers, x.shape, (x.dtype, factors[0].dtype)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Tensor | None, ...]:
        """dx = Σ dyᵢ Wᵢ + (dyᵢ Bᵢ) sᵢ Aᵢ; dAᵢ = sᵢ (dyᵢ Bᵢ)ᵀ x; dBᵢ = dyᵢᵀ (x (sᵢ Aᵢ)ᵀ)."""
        rows, projected, a, *b = ctx.saved_tensors
        x_dtype, factor_dtype = ctx.dtypes
        grads = [None if dy is None else dy.reshape(-1, dy.shape[-1]).to(rows.dtype) for dy in dys]
        through = torch.zeros_like(projected) if None in dys else torch.empty_like(projected)
        db: list[Tensor | None] = []
        for dy, slot, low, each in zip(grads, _columns(through, b), _columns(projected, b), b, strict=True):
            if dy is not None:
                torch.mm(dy, each, out=slot)
            db.append(None if dy is None else product_as(dy.T, low, factor_dtype))
        dx = None
        if ctx.needs_input_grad[0]:
            dx = through @ a
            for dy, layer in zip(grads, ctx.layers, strict=True):
                if dy is not None:
                    dx.addmm_(dy, layer.weight(rows.dtype))
            dx = dx.view(ctx.shape).to(x_dtype)
        da = scaled_rows(
            product_as(through.T, rows, factor_dtype),
            [each.shape[1] for each in b],
            [layer.scaling for layer in ctx.layers],
        )
        return dx, None, None, *(grad for pair in zip(da, db, strict=True) for grad in pair)


def _columns(projected: Tensor, b: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Each layer's share [tokens, rank] of what was projected for all of them."""
    return projected.split([each.shape[1] for each in b], dim=1)
