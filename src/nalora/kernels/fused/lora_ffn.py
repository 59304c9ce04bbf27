"""A gated FFN with its three adapters as one autograd function, which also adds to the statistics of its gate.

Saved for backward: the input x, the products z₀ = x W_gᵀ and u₀ = x W_uᵀ, and three low-rank projections. z, u and h
with the adapters' share are recomputed in registers; at high ranks z and u are saved with it. gate and up share one
product for their A.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from nalora.kernels.fused import gated
from nalora.kernels.fused.adapters import Factors
from nalora.kernels.fused.backward_pass import backward_pass
from nalora.kernels.fused.frozen import DenseWeight, FrozenWeight, Rows, input_gradient
from nalora.kernels.fused.gated import GateSpec, LowRank
from nalora.kernels.fused.lora_linear import in_shape, product_as, scaled_rows
from nalora.kernels.fused.norm_outputs import saved_form
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


class Saved(NamedTuple):
    """What backward needs of forward besides the input and the factors."""

    z: Tensor
    u: Tensor
    projected: Tensor
    h_projected: Tensor


class FFNGradients(NamedTuple):
    """Gradients of the input, if needed, of A of gate and up, stacked, and of the other factors."""

    x: Tensor | None
    a_both: Tensor
    b_gate: Tensor
    b_up: Tensor
    a_down: Tensor
    b_down: Tensor


def ffn_forward(
    rows: Tensor, weights: Weights, spec: GateSpec, sums: Sums | None = None, mask: Tensor | None = None
) -> tuple[Tensor, Saved]:
    """Return the output for rows [tokens, in]; add the unmasked tokens to `sums`, if given."""
    inner, outer = weights.inner, weights.outer
    rank = inner.b[0].shape[1]
    shared = Rows(rows)
    projected = rows @ inner.a.T
    x_gate, x_up = projected.split(rank, dim=1)
    if rank <= gated.MOST_IN_REGISTERS:
        z, u = weights.gate.product(shared), weights.up.product(shared)
        h = gated.forward(z, u, spec, LowRank(x_gate, x_up, *inner.b), sums, mask)
    else:
        z = weights.gate.adapted_product(shared, x_gate, inner.b[0])
        u = weights.up.adapted_product(shared, x_up, inner.b[1])
        h = gated.forward(z, u, spec, None, sums, mask)
    h_projected = h @ outer.a.T
    y = weights.down.adapted_product(Rows(h), h_projected, outer.b[0])
    return y, Saved(z, u, projected, h_projected)


def ffn_backward(
    dy: Tensor,
    rows: Tensor,
    saved: Saved,
    weights: Weights,
    spec: GateSpec,
    *,
    dtype: torch.dtype,
    needs_dx: bool,
    overwrite: bool = False,
) -> FFNGradients:
    """Go through down, then φ(z) ⊙ u, then gate and up; both paths are added to one buffer for dx.

    Args:
        dy: gradient of the output, [tokens, in].
        rows: the input.
        saved: by `ffn_forward`.
        weights: as given to `ffn_forward`.
        spec: as given to `ffn_forward`.
        dtype: of the gradients of the factors.
        needs_dx: whether the input needs a gradient.
        overwrite: whether no other backward pass needs z and u, so that their memory may be used.
    """
    z, u, projected, h_projected = saved
    (b_gate, b_up), a_down, (b_down,) = weights.inner.b, weights.outer.a, weights.outer.b
    rank = b_gate.shape[1]
    x_gate, x_up = projected.split(rank, dim=1)
    e = dy @ b_down
    db_down = product_as(dy.T, h_projected, dtype)
    # One product for dx needs the gradients of both in one matrix; two products can add to one result.
    together = not isinstance(weights.gate, DenseWeight)
    if rank <= gated.MOST_IN_REGISTERS:
        dh = input_gradient([weights.down], [dy])
        low_rank = LowRank(x_gate, x_up, b_gate, b_up)
        dz, du, db_gate, db_up, da_down = gated.backward(
            dh, z, u, spec, low_rank, (e, a_down), together=together, overwrite=overwrite
        )
    else:
        dh = input_gradient([weights.down], [dy], e, a_down)
        dz, du, h = gated.backward_of_complete(dh, z, u, spec, together=together, overwrite=overwrite)
        db_gate, db_up = (product_as(grad.T, low, dtype) for grad, low in ((dz, x_gate), (du, x_up)))
        da_down = product_as(e.T, h, dtype)
    del dh  # with an FP8 base, whose products need memory of their own, it is not the memory of dz
    through = torch.empty_like(projected)
    torch.mm(dz, b_gate, out=through[:, :rank])
    torch.mm(du, b_up, out=through[:, rank:])
    scalings = weights.gate_scaling, weights.up_scaling
    da_both = scaled_rows(product_as(through.T, rows, dtype), (rank, rank), scalings)
    dx = input_gradient([weights.gate, weights.up], [dz, du], through, weights.inner.a) if needs_dx else None
    factors = (da_both, db_gate, db_up, da_down.mul_(weights.down_scaling), db_down)
    return FFNGradients(dx, *(factor.to(dtype) for factor in factors))


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
        rows = x.reshape(-1, x.shape[-1]).to(inner.a.dtype)
        y, saved = ffn_forward(rows, weights, spec, sums, mask)
        source, ctx.rows_of = saved_form(x, rows)
        ctx.save_for_backward(source, *saved, inner.a, *inner.b, outer.a, *outer.b)
        # Without the factors, which are already among the saved tensors.
        ctx.weights, ctx.spec, ctx.shape = weights[:6], spec, x.shape
        ctx.dtypes = x.dtype, factors[0].dtype
        return in_shape(y, x.shape)

    @staticmethod
    @backward_pass
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x and of A and B of gate, up and down."""
        source, z, u, projected, h_projected, a_both, b_gate, b_up, a_down, b_down = ctx.saved_tensors
        rows = ctx.rows_of(source)
        x_dtype, dtype = ctx.dtypes
        weights = Weights(*ctx.weights, Factors(a_both, (b_gate, b_up)), Factors(a_down, (b_down,)))
        grads = ffn_backward(
            dy.reshape(-1, dy.shape[-1]).to(rows.dtype), rows, Saved(z, u, projected, h_projected), weights, ctx.spec,
            dtype=dtype, needs_dx=ctx.needs_input_grad[0],
            # False with retain_graph=True, after which another backward pass reads z and u.
            overwrite=not torch._C._autograd._get_current_graph_task_keep_graph(),
        )  # fmt: skip
        dx = None if grads.x is None else grads.x.view(ctx.shape).to(x_dtype)
        da_gate, da_up = grads.a_both.chunk(2)
        return dx, None, None, None, None, da_gate, grads.b_gate, da_up, grads.b_up, grads.a_down, grads.b_down
