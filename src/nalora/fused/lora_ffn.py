"""A gated FFN with its three adapters as one autograd function, the statistics of its gate inside.

Kept for backward: the input x, the products z₀ = x W_gᵀ and u₀ = x W_uᵀ, and three skinny projections. z, u and h with
the adapters' share are formed again in registers. gate and up share one product for their A.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nalora.fused import gated
from nalora.fused.gated import GateSpec, LowRank
from nalora.fused.lora_linear import Weight, compute_dtype
from nalora.statistics import Sums


class Weights(NamedTuple):
    """The frozen weights of an FFN and the LoRA scalings of its adapters."""

    gate: Weight
    up: Weight
    down: Weight
    gate_scaling: float
    up_scaling: float
    down_scaling: float


class LoRAFFN(torch.autograd.Function):
    """y = (φ(z) ⊙ u) W_dᵀ + s_d (h A_dᵀ) B_dᵀ, with z and u adapted; gradients for x and the six factors."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        a_gate: Tensor,
        b_gate: Tensor,
        a_up: Tensor,
        b_up: Tensor,
        a_down: Tensor,
        b_down: Tensor,
        weights: Weights,
        spec: GateSpec,
        sums: Sums | None,
        mask: Tensor | None,
    ) -> Tensor:
        """The output; the tokens that `mask` leaves are added to `sums`, where given."""
        dtype = compute_dtype(x)
        rank = a_gate.shape[0]
        rows = x.reshape(-1, x.shape[-1]).to(dtype)
        a_both = torch.cat([a_gate, a_up]).to(dtype)
        projected = rows @ a_both.T
        low_rank = LowRank(
            projected[:, :rank],
            projected[:, rank:],
            (b_gate * weights.gate_scaling).to(dtype),
            (b_up * weights.up_scaling).to(dtype),
        )
        z, u = rows @ weights.gate(dtype).T, rows @ weights.up(dtype).T
        h = gated.forward(z, u, spec, low_rank, sums, mask)
        a_low, b_low = a_down.to(dtype), (b_down * weights.down_scaling).to(dtype)
        h_projected = h @ a_low.T
        y = (h_projected @ b_low.T).addmm_(h, weights.down(dtype).T)
        ctx.save_for_backward(rows, z, u, projected, h_projected, a_both, *low_rank[2:], a_low, b_low)
        ctx.weights, ctx.spec, ctx.shape = weights, spec, x.shape
        ctx.dtypes = x.dtype, [each.dtype for each in (a_gate, b_gate, a_up, b_up, a_down, b_down)]
        return y.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Down, then the gate's product, then gate and up; dx gathers both paths in one buffer."""
        rows, z, u, projected, h_projected, a_both, b_gate, b_up, a_down, b_down = ctx.saved_tensors
        weights, dtype, rank = ctx.weights, rows.dtype, b_gate.shape[1]
        x_dtype, factor_dtypes = ctx.dtypes
        dy = dy.reshape(-1, dy.shape[-1]).to(dtype)
        e = dy @ b_down
        db_down = dy.T @ h_projected
        dh = dy @ weights.down(dtype)
        low_rank = LowRank(projected[:, :rank], projected[:, rank:], b_gate, b_up)
        dz, du, db_gate, db_up, da_down = gated.backward(dh, z, u, ctx.spec, low_rank, (e, a_down), overwrite=True)
        through = torch.empty_like(projected)
        torch.mm(dz, b_gate, out=through[:, :rank])
        torch.mm(du, b_up, out=through[:, rank:])
        da_both = through.T @ rows
        dx = None
        if ctx.needs_input_grad[0]:
            dx = (through @ a_both).addmm_(dz, weights.gate(dtype)).addmm_(du, weights.up(dtype))
            dx = dx.view(ctx.shape).to(x_dtype)
        assert db_gate is not None
        assert db_up is not None
        factors = (
            da_both[:rank],
            db_gate * weights.gate_scaling,
            da_both[rank:],
            db_up * weights.up_scaling,
            da_down,
            db_down.float() * weights.down_scaling,
        )
        grads = (None if f is None else f.to(d) for f, d in zip(factors, factor_dtypes, strict=True))
        return dx, *grads, None, None, None, None
