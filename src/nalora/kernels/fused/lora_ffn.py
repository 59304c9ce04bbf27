"""A gated FFN with its three adapters as one autograd function, which also adds to the statistics of its gate.

Saved for backward: the input x, the products z₀ = x W_gᵀ and u₀ = x W_uᵀ, and three low-rank projections. z, u and h
with the adapters' share are recomputed in registers; at high ranks z and u are saved with it. gate and up share one
product for their A.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nalora.kernels.fused import gated
from nalora.kernels.fused.adapters import Factors
from nalora.kernels.fused.frozen import DenseWeight, FrozenWeight, Rows, input_gradient
from nalora.kernels.fused.gated import GateSpec, LowRank
from nalora.kernels.fused.lora_linear import product_as, scaled_rows
from nalora.kernels.statistics import Sums


class Weights(NamedTuple):
    """The frozen weights of an FFN, and the scalings and cast factors of its adapters."""

    gate: FrozenWeight
    up: FrozenWeight
    down: FrozenWeight
    gate_scaling: float
    up_scaling: float
    down_scaling: float
    inner: Factors  # of gate and up
    outer: Factors  # of down


class LoRAFFN(torch.autograd.Function):
    """y = h W_dᵀ + (h (s_d A_d)ᵀ) B_dᵀ with h = φ(z) ⊙ u, z and u adapted; gradients for x and the six factors."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Weights, spec: GateSpec, sums: Sums | None, mask: Tensor | None, *factors: Tensor
    ) -> Tensor:
        """Return the output; add the unmasked tokens to `sums`, if given.

        `factors` are A and B of gate, up and down as PEFT stores them, which get the gradients.
        """
        inner, outer = weights.inner, weights.outer
        rank = factors[0].shape[0]
        rows = Rows(x.reshape(-1, x.shape[-1]).to(inner.a.dtype))
        projected = rows.tensor @ inner.a.T
        x_gate, x_up = projected.split(rank, dim=1)
        if rank <= gated.MOST_IN_REGISTERS:
            z, u = weights.gate.product(rows), weights.up.product(rows)
            h = gated.forward(z, u, spec, LowRank(x_gate, x_up, *inner.b), sums, mask)
        else:
            z = weights.gate.adapted_product(rows, x_gate, inner.b[0])
            u = weights.up.adapted_product(rows, x_up, inner.b[1])
            h = gated.forward(z, u, spec, None, sums, mask)
        h_projected = h @ outer.a.T
        y = weights.down.adapted_product(Rows(h), h_projected, outer.b[0])
        ctx.save_for_backward(rows.tensor, z, u, projected, h_projected, inner.a, *inner.b, outer.a, *outer.b)
        # Without the factors, which are already among the saved tensors.
        ctx.weights, ctx.spec, ctx.shape = weights[:6], spec, x.shape
        ctx.dtypes = x.dtype, [factor.dtype for factor in factors]
        return y.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Go through down, then φ(z) ⊙ u, then gate and up; both paths are added to one buffer for dx."""
        rows, z, u, projected, h_projected, a_both, b_gate, b_up, a_down, b_down = ctx.saved_tensors
        gate, up, down, *scalings = ctx.weights
        rank = b_gate.shape[1]
        x_dtype, factor_dtypes = ctx.dtypes
        dy = dy.reshape(-1, dy.shape[-1]).to(rows.dtype)
        x_gate, x_up = projected.split(rank, dim=1)
        e = dy @ b_down
        db_down = product_as(dy.T, h_projected, factor_dtypes[5])
        # One product for dx needs the gradients of both in one matrix; two products can add to one result.
        together = not isinstance(gate, DenseWeight)
        if rank <= gated.MOST_IN_REGISTERS:
            dh = input_gradient([down], [dy])
            low_rank = LowRank(x_gate, x_up, b_gate, b_up)
            dz, du, db_gate, db_up, da_down = gated.backward(
                dh, z, u, ctx.spec, low_rank, (e, a_down), together=together
            )
        else:
            dh = input_gradient([down], [dy], e, a_down)
            dz, du, h = gated.backward_of_complete(dh, z, u, ctx.spec, together=together)
            db_gate, db_up = (
                product_as(grad.T, low, dtype)
                for grad, low, dtype in ((dz, x_gate, factor_dtypes[1]), (du, x_up, factor_dtypes[3]))
            )
            da_down = product_as(e.T, h, factor_dtypes[4])
        through = torch.empty_like(projected)
        torch.mm(dz, b_gate, out=through[:, :rank])
        torch.mm(du, b_up, out=through[:, rank:])
        da_gate, da_up = scaled_rows(product_as(through.T, rows, factor_dtypes[0]), (rank, rank), scalings[:2])
        dx = None
        if ctx.needs_input_grad[0]:
            dx = input_gradient([gate, up], [dz, du], through, a_both).view(ctx.shape).to(x_dtype)
        factors = (da_gate, db_gate, da_up, db_up, da_down.mul_(scalings[2]), db_down)
        grads = (factor.to(dtype) for factor, dtype in zip(factors, factor_dtypes, strict=True))
        return dx, None, None, None, None, *grads
