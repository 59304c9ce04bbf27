"""φ(z) ⊙ u of an FFN in one pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nalora.kernels.fused import gated
from nalora.kernels.fused.gated import GateSpec
from nalora.kernels.statistics import Sums


class GatedProduct(torch.autograd.Function):
    """h = φ(z) ⊙ (u + b); only z and u are kept for backward."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, u: Tensor, spec: GateSpec, sums: Sums | None, mask: Tensor | None) -> Tensor:
        """h; the tokens that `mask` leaves are added to `sums`, where given."""
        ctx.save_for_backward(z, u)
        ctx.spec = spec
        width = z.shape[-1]
        return gated.forward(z.reshape(-1, width), u.reshape(-1, width), spec, None, sums, mask).view(z.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of z and u in one pass."""
        z, u = ctx.saved_tensors
        width = z.shape[-1]
        rows = (each.reshape(-1, width) for each in (dh, z, u))
        grads = gated.backward(*rows, ctx.spec)
        return grads.z.view(z.shape), grads.u.view(u.shape), None, None, None
