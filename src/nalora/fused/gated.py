"""h = φ(z) ⊙ (u + b) as one operator, with the statistics of z as a by-product."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from nalora.fused.gated_kernels import backward_kernel, forward_kernel
from nalora.statistics.triton_engine import is_even, tile

_BLOCK_TOKENS = 16
_BLOCK_CHANNELS = 128
_WARPS = 4


class GateSpec(NamedTuple):
    """What a kernel must know of a block: its activation, its regimes, its factor and what is summed."""

    number: int
    limit: float
    lower: float
    upper: float
    up_offset: float
    utility: bool


class LowRank(NamedTuple):
    """The adapters' share of z and u: projected inputs [tokens, rank] and factors B [width, rank], scaled."""

    x_gate: Tensor
    x_up: Tensor
    b_gate: Tensor
    b_up: Tensor


def forward(
    z: Tensor, u: Tensor, mask: Tensor | None, spec: GateSpec, low_rank: LowRank | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(h, partial sums, counts) of z and u of shape [tokens, width]; see `nalora.statistics.triton_engine.add_up`."""
    tokens, width = z.shape
    tiling = tile(tokens, width, _BLOCK_TOKENS, _BLOCK_CHANNELS)
    h = torch.empty(tokens, width, dtype=z.dtype, device=z.device)
    partial = torch.empty(tiling.parts, width, dtype=torch.float32, device=z.device)
    counts = torch.empty(tiling.parts, tiling.blocks, 2, dtype=torch.int32, device=z.device)
    rank = low_rank.b_gate.shape[1] if low_rank else 0
    forward_kernel[tiling.blocks, tiling.parts](
        z, u, h, mask, *(low_rank or (None,) * 4), partial, counts,
        tokens, width, tiling.tokens_per_part, spec.lower, spec.upper, spec.limit, spec.up_offset,
        z.stride(0), u.stride(0), low_rank.x_gate.stride(0) if low_rank else 0,
        NUMBER=spec.number, LIMITED=spec.limit != float("inf"), FAST=z.is_cuda,
        EVEN=is_even(tokens, width, _BLOCK_TOKENS, _BLOCK_CHANNELS),
        UTILITY=spec.utility, WITH_MASK=mask is not None, RANK=rank, R=_padded(rank),
        BLOCK_TOKENS=_BLOCK_TOKENS, BLOCK_CHANNELS=_BLOCK_CHANNELS, num_warps=_WARPS,
    )  # fmt: skip
    return h, partial, counts


class Gradients(NamedTuple):
    """Gradients of z and u, and of the low-rank factors as far as they need z, u or h; None without adapters."""

    z: Tensor
    u: Tensor
    b_gate: Tensor | None
    b_up: Tensor | None
    a_down: Tensor | None


def backward(
    dh: Tensor,
    z: Tensor,
    u: Tensor,
    spec: GateSpec,
    low_rank: LowRank | None = None,
    down: tuple[Tensor, Tensor] | None = None,
) -> Gradients:
    """The gradients for dh of shape [tokens, width]; dh is overwritten by that of z where it may be.

    Args:
        dh: gradient of h without the down adapter's share.
        z: z₀ as given to `forward`.
        u: u₀ as given to `forward`.
        spec: the block.
        low_rank: as given to `forward`.
        down: (e, A_d): the output's gradient through the scaled B_d, [tokens, rank], and A_d, [rank, width].
    """
    tokens, width = z.shape
    tiling = tile(tokens, width, _BLOCK_TOKENS, _BLOCK_CHANNELS)
    dz, du = torch.empty_like(z), torch.empty_like(u)
    e, a_down = down or (None, None)
    rank = low_rank.b_gate.shape[1] if low_rank else 0
    factors = [
        torch.empty(tiling.parts, rank, width, dtype=torch.float32, device=z.device) if low_rank else None
        for _ in range(3)
    ]
    x_gate, x_up, b_gate, b_up = low_rank or (None,) * 4
    backward_kernel[tiling.blocks, tiling.parts](
        dh, z, u, dz, du, x_gate, x_up, e, b_gate, b_up, a_down, *factors,
        tokens, width, tiling.tokens_per_part, spec.limit, spec.up_offset,
        z.stride(0), u.stride(0), x_gate.stride(0) if x_gate is not None else 0, dh.stride(0),
        NUMBER=spec.number, LIMITED=spec.limit != float("inf"), FAST=z.is_cuda,
        EVEN=is_even(tokens, width, _BLOCK_TOKENS, _BLOCK_CHANNELS),
        RANK=rank, R=_padded(rank),
        BLOCK_TOKENS=_BLOCK_TOKENS, BLOCK_CHANNELS=_BLOCK_CHANNELS, num_warps=_WARPS,
    )  # fmt: skip
    d_gate, d_up, d_down = (None if each is None else each.sum(0) for each in factors)
    return Gradients(dz, du, None if d_gate is None else d_gate.T, None if d_up is None else d_up.T, d_down)


def _padded(rank: int) -> int:
    """Tensor cores take no fewer than 16 columns."""
    return max(16, triton.next_power_of_2(rank)) if rank else 16
