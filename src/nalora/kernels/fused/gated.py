"""h = φ(z) ⊙ (u + b) as one operator, with the statistics of z as a by-product."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from nalora.kernels.fused.gated_kernels import backward_kernel, forward_kernel
from nalora.kernels.statistics.sums import Sums
from nalora.kernels.statistics.triton_sums import is_even, may_approximate, tokens_per_part

_PROGRAMS = 2048


class Tile(NamedTuple):
    """What a program works on at a time; the best of a sweep on an H200 at 4,096 × 14,336 in bf16."""

    tokens: int
    channels: int
    warps: int
    stages: int


_FORWARD = Tile(16, 64, 2, 3)
_BACKWARD = Tile(64, 64, 4, 3)


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
    z: Tensor, u: Tensor, spec: GateSpec, low_rank: LowRank, sums: Sums | None = None, mask: Tensor | None = None
) -> Tensor:
    """h for z₀ and u₀ of shape [tokens, width]; the tokens that `mask` leaves are added to `sums`, where given."""
    tokens, width = z.shape
    tile = _FORWARD
    parts = sums.tokens.shape[0] if sums else _parts(tokens, width, tile)
    h = torch.empty(tokens, width, dtype=z.dtype, device=z.device)
    rank = low_rank.b_gate.shape[1]
    forward_kernel[triton.cdiv(width, tile.channels), parts](
        z, u, h, mask, *low_rank, *(sums or (None,) * 3),
        tokens, width, sums.outside.shape[1] if sums else 0, tokens_per_part(tokens, parts, tile.tokens),
        spec.lower, spec.upper, spec.limit, spec.up_offset,
        z.stride(0), u.stride(0), low_rank.x_gate.stride(0),
        NUMBER=spec.number, LIMITED=spec.limit != float("inf"), FAST=may_approximate(z),
        EVEN=is_even(tokens, width, tile.tokens, tile.channels),
        COUNT=sums is not None, UTILITY=spec.utility, WITH_MASK=mask is not None, RANK=rank, R=_padded(rank),
        BLOCK_TOKENS=tile.tokens, BLOCK_CHANNELS=tile.channels, STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    return h


class Gradients(NamedTuple):
    """Gradients of z and u, and of the low-rank factors as far as they need z, u or h."""

    z: Tensor
    u: Tensor
    b_gate: Tensor
    b_up: Tensor
    a_down: Tensor


def backward(
    dh: Tensor, z: Tensor, u: Tensor, spec: GateSpec, low_rank: LowRank, down: tuple[Tensor, Tensor]
) -> Gradients:
    """The gradients for dh of shape [tokens, width].

    Args:
        dh: gradient of h without the down adapter's share; the gradient of z is written in its place.
        z: z₀ as given to `forward`.
        u: u₀ as given to `forward`.
        spec: the block.
        low_rank: as given to `forward`.
        down: (e, A_d): the output's gradient through the scaled B_d, [tokens, rank], and A_d, [rank, width].
    """
    tokens, width = z.shape
    tile = _BACKWARD
    parts = _parts(tokens, width, tile)
    dz, du = dh, torch.empty_like(u)
    e, a_down = down
    rank = low_rank.b_gate.shape[1]
    factors = [torch.empty(parts, rank, width, dtype=torch.float32, device=z.device) for _ in range(3)]
    x_gate, x_up, b_gate, b_up = low_rank
    backward_kernel[triton.cdiv(width, tile.channels), parts](
        dh, z, u, dz, du, x_gate, x_up, e, b_gate, b_up, a_down, *factors,
        tokens, width, tokens_per_part(tokens, parts, tile.tokens), spec.limit, spec.up_offset,
        z.stride(0), u.stride(0), x_gate.stride(0), dh.stride(0),
        NUMBER=spec.number, LIMITED=spec.limit != float("inf"), FAST=may_approximate(z),
        EVEN=is_even(tokens, width, tile.tokens, tile.channels),
        RANK=rank, R=_padded(rank),
        BLOCK_TOKENS=tile.tokens, BLOCK_CHANNELS=tile.channels, STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    d_gate, d_up, d_down = (parts_of_factor.sum(0) for parts_of_factor in factors)
    return Gradients(dz, du, d_gate.T, d_up.T, d_down)


def _parts(tokens: int, width: int, tile: Tile) -> int:
    """Enough parts of the tokens to fill a large GPU, none without a tile of its own."""
    return min(triton.cdiv(_PROGRAMS, triton.cdiv(width, tile.channels)), triton.cdiv(tokens, tile.tokens))


def _padded(rank: int) -> int:
    """Tensor cores take no fewer than 16 columns."""
    return max(16, triton.next_power_of_2(rank))
