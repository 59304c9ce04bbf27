"""Frozen linear layers of one input, with their LoRA adapters, as one autograd function.

PEFT computes W x, then casts x to the adapter's float32, projects it, expands it, scales it and adds it: five passes
and two copies of x for each layer. Here the frozen product is added to the low-rank term by the matrix product
itself, layers that share x (query, key and value) share their A-projection and the buffer of x's gradient, x is kept
once in its own dtype, and only A and B get gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# A frozen weight [out, in] in the dtype asked for: kept as it is, or unpacked from 4 bits for the moment.
Weight = Callable[[torch.dtype], Tensor]


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


class LoRALinears(torch.autograd.Function):
    """yᵢ = x Wᵢᵀ + biasᵢ + sᵢ (x Aᵢᵀ) Bᵢᵀ for several layers, with gradients for x, Aᵢ and Bᵢ alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layers: tuple[FrozenLinear, ...], *factors: Tensor) -> tuple[Tensor, ...]:
        """Save x, its projections and the factors, nothing of an output's size; `factors` is A₁, B₁, A₂, B₂, …"""
        dtype = compute_dtype(x)
        rows = x.reshape(-1, x.shape[-1]).to(dtype)
        a = torch.cat(factors[::2]).to(dtype)
        b = [(each * layer.scaling).to(dtype) for each, layer in zip(factors[1::2], layers, strict=True)]
        projected = rows @ a.T
        outputs = []
        for low, each, layer in zip(_columns(projected, b), b, layers, strict=True):
            y = low @ each.T if layer.bias is None else torch.addmm(layer.bias.to(dtype), low, each.T)
            outputs.append(y.addmm_(rows, layer.weight(dtype).T).view(*x.shape[:-1], -1))
        ctx.save_for_backward(rows, projected, a, *b)
        ctx.set_materialize_grads(False)
        ctx.layers, ctx.shape, ctx.dtypes = layers, x.shape, (x.dtype, [each.dtype for each in factors])
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Tensor | None, ...]:
        """dx = Σ dyᵢ Wᵢ + (sᵢ dyᵢ Bᵢ) Aᵢ; dAᵢ = (sᵢ dyᵢ Bᵢ)ᵀ x; dBᵢ = sᵢ dyᵢᵀ (x Aᵢᵀ)."""
        rows, projected, a, *b = ctx.saved_tensors
        x_dtype, factor_dtypes = ctx.dtypes
        grads = [None if dy is None else dy.reshape(-1, dy.shape[-1]).to(rows.dtype) for dy in dys]
        through = torch.zeros_like(projected) if None in dys else torch.empty_like(projected)
        db: list[Tensor | None] = []
        pieces = zip(grads, _columns(through, b), _columns(projected, b), b, ctx.layers, strict=True)
        for dy, slot, low, each, layer in pieces:
            if dy is not None:
                torch.mm(dy, each, out=slot)
            db.append(None if dy is None else (dy.T @ low).mul_(layer.scaling))
        dx = None
        if ctx.needs_input_grad[0]:
            dx = through @ a
            for dy, layer in zip(grads, ctx.layers, strict=True):
                if dy is not None:
                    dx.addmm_(dy, layer.weight(rows.dtype))
            dx = dx.view(ctx.shape).to(x_dtype)
        da = (through.T @ rows).split([each.shape[1] for each in b])
        factors = [grad for pair in zip(da, db, strict=True) for grad in pair]
        casts = (None if grad is None else grad.to(d) for grad, d in zip(factors, factor_dtypes, strict=True))
        return dx, None, *casts


def _columns(projected: Tensor, b: list[Tensor]) -> tuple[Tensor, ...]:
    """Each layer's share [tokens, rank] of what was projected for all of them."""
    return projected.split([each.shape[1] for each in b], dim=1)
