"""φ(z) ⊙ u of an FFN in one pass, between PEFT's own linear layers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from nalora.blocks import FFNBlock
from nalora.fused import gated
from nalora.fused.gated import GateSpec
from nalora.fused.layers import replace_forward
from nalora.observer import GateObserver
from nalora.statistics import Sums
from nalora.statistics.triton_activations import number_and_limit
from nalora.statistics.triton_engine import as_bytes


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


def fuse_product(host: nn.Module, block: FFNBlock, observer: GateObserver) -> Callable[[], None] | None:
    """Compute the FFN's product as one function; the result puts the module's own forward back."""
    known = number_and_limit(block.activation)
    if known is None or block.up is None or block.fused:
        return None
    gate, up, down = block.gate.module, block.up.module, block.down.module
    spec = GateSpec(*known, *observer.thresholds, block.up_offset, observer.with_up)
    original = host.forward

    @functools.wraps(original)
    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args or kwargs or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return original(x, *args, **kwargs)
        with observer.blindfolded():
            z, u = gate(x), up(x)
        mask = as_bytes(observer.token_mask.of(z.shape[:-1]))
        sums = observer.claim(z.device) if host.training and observer.is_adapted_pass() else None
        return down(GatedProduct.apply(z, u, spec, sums, mask))

    return replace_forward(host, forward)
