"""A frozen linear layer and its LoRA adapter as one autograd function.

PEFT computes W x, then casts x to the adapter's float32, projects it, expands it, scales it and adds it: five passes
and two copies of x. Here the low-rank term is added by the matrix product itself, x is kept once in its own dtype, and
only A and B get gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# A frozen weight [out, in] in the dtype asked for: kept as it is, or unpacked from 4 bits for the moment.
Weight = Callable[[torch.dtype], Tensor]


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype that a linear layer would compute in here."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


class LoRALinear(torch.autograd.Function):
    """y = x Wᵀ + bias + s (x Aᵀ) Bᵀ with gradients for x, A and B alone."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, a: Tensor, b: Tensor, bias: Tensor | None, weight: Weight, scaling: float
    ) -> Tensor:
        """Save x, x Aᵀ and the two factors, nothing of the output's size."""
        dtype = compute_dtype(x)
        rows = x.reshape(-1, x.shape[-1]).to(dtype)
        w, a_low, b_low = weight(dtype), a.to(dtype), (b * scaling).to(dtype)
        y = rows @ w.T if bias is None else torch.addmm(bias.to(dtype), rows, w.T)
        projected = rows @ a_low.T
        y.addmm_(projected, b_low.T)
        ctx.save_for_backward(rows, projected, a_low, b_low)
        ctx.weight, ctx.scaling, ctx.shape, ctx.dtypes = weight, scaling, x.shape, (x.dtype, a.dtype, b.dtype)
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """dx = dy W + (s dy B) A; dA = (s dy B)ᵀ x; dB = s dyᵀ (x Aᵀ)."""
        rows, projected, a, b = ctx.saved_tensors
        x_dtype, a_dtype, b_dtype = ctx.dtypes
        dy = dy.reshape(-1, dy.shape[-1]).to(rows.dtype)
        through = dy @ b
        dx = None
        if ctx.needs_input_grad[0]:
            dx = dy @ ctx.weight(rows.dtype)
            dx = dx.addmm_(through, a).view(ctx.shape).to(x_dtype)
        da = (through.T @ rows).to(a_dtype)
        db = (dy.T @ projected).to(b_dtype).mul_(ctx.scaling)
        return dx, da, db, None, None, None
