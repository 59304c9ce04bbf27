"""The Triton engine: z is read once, and partial sums are added up in a fixed order, so results repeat to the bit."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nalora.activations import Activation
from nalora.statistics.sums import Sums
from nalora.statistics.triton_activations import number_and_limit, phi_and_derivative

_BLOCK_TOKENS = 16
_BLOCK_CHANNELS = 128
_WARPS = 4
# Enough programs to keep every multiprocessor of a large GPU busy a few times over.
_PROGRAMS = 2048


@triton.jit
def _partial_sums(
    z_ptr, u_ptr, mask_ptr, partial_ptr, counts_ptr,
    tokens, width, tokens_per_part, lower, upper, limit,
    z_stride, z_step, u_stride, u_step,
    NUMBER: tl.constexpr, LIMITED: tl.constexpr, FAST: tl.constexpr, EVEN: tl.constexpr,
    WITH_U: tl.constexpr, WITH_MASK: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr,
):  # fmt: skip
    """One part of the tokens × one block of channels → Σ|φ′| per channel, and how many z lie below and above."""
    channels = tl.program_id(0) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    part = tl.program_id(1)
    first = part.to(tl.int64) * tokens_per_part
    last = tl.minimum(first + tokens_per_part, tokens)
    in_width = channels < width
    total = tl.zeros([BLOCK_TOKENS, BLOCK_CHANNELS], tl.float32)
    outside = tl.zeros([BLOCK_TOKENS, BLOCK_CHANNELS], tl.int32)
    for start in range(first, last, BLOCK_TOKENS):
        rows = start + tl.arange(0, BLOCK_TOKENS).to(tl.int64)
        z_at = z_ptr + rows[:, None] * z_stride + channels[None, :] * z_step
        u_at = u_ptr + rows[:, None] * u_stride + channels[None, :] * u_step if WITH_U else z_at
        if EVEN:
            z = tl.load(z_at).to(tl.float32)
            u = tl.load(u_at).to(tl.float32) if WITH_U else z
            total, outside = tally(z, u, total, outside, lower, upper, limit, NUMBER, LIMITED, FAST, WITH_U)
        else:
            counted = rows < last
            if WITH_MASK:
                counted = counted & (tl.load(mask_ptr + rows, mask=counted, other=0) != 0)
            here = counted[:, None] & in_width[None, :]
            z = tl.load(z_at, mask=here, other=0.0).to(tl.float32)
            u = tl.load(u_at, mask=here, other=0.0).to(tl.float32) if WITH_U else z
            more, beyond = tally(z, u, total, outside, lower, upper, limit, NUMBER, LIMITED, FAST, WITH_U)
            total = tl.where(here, more, total)
            outside = tl.where(here, beyond, outside)
    store_tally(partial_ptr, counts_ptr, total, outside, part, channels, in_width, width)


@triton.jit
def tally(
    z, u, total, outside, lower, upper, limit,
    NUMBER: tl.constexpr, LIMITED: tl.constexpr, FAST: tl.constexpr, WITH_U: tl.constexpr,
):  # fmt: skip
    """Add one tile: |φ′(z)| to the totals, and z beyond a threshold to the counts, two of them in one integer."""
    _, derivative = phi_and_derivative(z, limit, NUMBER, LIMITED, FAST)
    k = tl.abs(derivative)
    if WITH_U:
        k = k * tl.abs(u)
    return total + k, outside + tl.where(z < lower, 1, 0) + tl.where(z > upper, 65536, 0)


@triton.jit
def store_tally(partial_ptr, counts_ptr, total, outside, part, channels, in_width, width):
    """Leave a program's sums in its own place, for `_add_up` to add in order."""
    tl.store(partial_ptr + part.to(tl.int64) * width + channels, tl.sum(total, 0), mask=in_width)
    slot = counts_ptr + (part.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)) * 2
    tl.store(slot, tl.sum(tl.sum(outside & 65535, 0), 0))
    tl.store(slot + 1, tl.sum(tl.sum(outside >> 16, 0), 0))


@triton.jit
def _add_up(
    partial_ptr, counts_ptr, mask_ptr, sensitivity_ptr, regimes_ptr, tokens_ptr,
    tokens, width, parts, slots,
    WITH_MASK: tl.constexpr, BLOCK_PARTS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr, BLOCK_SLOTS: tl.constexpr,
):  # fmt: skip
    """Add the parts to the block's buffers, always in the same order; the last program adds the counts."""
    if tl.program_id(0) < tl.num_programs(0) - 1:
        channels = tl.program_id(0) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
        in_width = channels < width
        total = tl.zeros([BLOCK_PARTS, BLOCK_CHANNELS], tl.float32)
        for start in range(0, parts, BLOCK_PARTS):
            part = start + tl.arange(0, BLOCK_PARTS)
            there = (part < parts)[:, None] & in_width[None, :]
            total += tl.load(partial_ptr + part[:, None] * width + channels[None, :], mask=there, other=0.0)
        old = tl.load(sensitivity_ptr + channels, mask=in_width, other=0.0)
        tl.store(sensitivity_ptr + channels, old + tl.sum(total, 0), mask=in_width)
    else:
        lanes = tl.arange(0, BLOCK_SLOTS)
        below = tl.zeros([BLOCK_SLOTS], tl.int64)
        above = tl.zeros([BLOCK_SLOTS], tl.int64)
        for start in range(0, slots, BLOCK_SLOTS):
            there = start + lanes < slots
            below += tl.load(counts_ptr + (start + lanes) * 2, mask=there, other=0).to(tl.int64)
            above += tl.load(counts_ptr + (start + lanes) * 2 + 1, mask=there, other=0).to(tl.int64)
        if WITH_MASK:
            real = tl.zeros([BLOCK_SLOTS], tl.int64)
            for start in range(0, tokens, BLOCK_SLOTS):
                there = start + lanes < tokens
                real += (tl.load(mask_ptr + start + lanes, mask=there, other=0) != 0).to(tl.int64)
            counted = tl.sum(real, 0)
        else:
            counted = tokens.to(tl.int64)
        n_below = tl.sum(below, 0)
        n_above = tl.sum(above, 0)
        tl.store(regimes_ptr, tl.load(regimes_ptr) + n_below)
        tl.store(regimes_ptr + 1, tl.load(regimes_ptr + 1) + counted * width - n_below - n_above)
        tl.store(regimes_ptr + 2, tl.load(regimes_ptr + 2) + n_above)
        tl.store(tokens_ptr, tl.load(tokens_ptr) + counted)


class Tiling(NamedTuple):
    """How tokens and channels are dealt out to programs."""

    blocks: int
    parts: int
    tokens_per_part: int


def tile(tokens: int, width: int, block_tokens: int, block_channels: int) -> Tiling:
    """Enough parts of the tokens to fill the device, none shorter than a few tiles, always the same for one shape."""
    blocks = triton.cdiv(width, block_channels)
    parts = max(1, min(_PROGRAMS // blocks, triton.cdiv(tokens, 4 * block_tokens)))
    tokens_per_part = triton.cdiv(triton.cdiv(tokens, parts), block_tokens) * block_tokens
    return Tiling(blocks, triton.cdiv(tokens, tokens_per_part), tokens_per_part)


def accumulate(
    sums: Sums,
    z: Tensor,
    activation: Activation,
    thresholds: tuple[float, float],
    u: Tensor | None = None,
    token_mask: Tensor | None = None,
) -> None:
    """Add the tokens of z to `sums`, as `nalora.statistics.reference.accumulate` does, in one pass over z."""
    known = number_and_limit(activation)
    assert known is not None
    width = z.shape[-1]
    z, u = z.reshape(-1, width), None if u is None else u.reshape(-1, width)
    tokens = z.shape[0]
    if tokens == 0:
        return
    mask = as_bytes(token_mask)
    tiling = tile(tokens, width, _BLOCK_TOKENS, _BLOCK_CHANNELS)
    partial = torch.empty(tiling.parts, width, dtype=torch.float32, device=z.device)
    counts = torch.empty(tiling.parts, tiling.blocks, 2, dtype=torch.int32, device=z.device)
    number, limit = known
    _partial_sums[tiling.blocks, tiling.parts](
        z, u, mask, partial, counts,
        tokens, width, tiling.tokens_per_part, *thresholds, limit,
        *z.stride(), *(u.stride() if u is not None else (0, 0)),
        NUMBER=number, LIMITED=limit != float("inf"), FAST=z.is_cuda,
        EVEN=mask is None and is_even(tokens, width, _BLOCK_TOKENS, _BLOCK_CHANNELS),
        WITH_U=u is not None, WITH_MASK=mask is not None,
        BLOCK_TOKENS=_BLOCK_TOKENS, BLOCK_CHANNELS=_BLOCK_CHANNELS, num_warps=_WARPS,
    )  # fmt: skip
    add_up(sums, partial, counts, mask, tokens)


def add_up(sums: Sums, partial: Tensor, counts: Tensor, mask: Tensor | None, tokens: int) -> None:
    """Add the partial sums of a pass to the block's buffers."""
    parts, width = partial.shape
    _add_up[triton.cdiv(width, _BLOCK_CHANNELS) + 1,](
        partial, counts, mask, *sums,
        tokens, width, parts, counts.numel() // 2,
        WITH_MASK=mask is not None, BLOCK_PARTS=32, BLOCK_CHANNELS=_BLOCK_CHANNELS, BLOCK_SLOTS=1024,
    )  # fmt: skip


def as_bytes(token_mask: Tensor | None) -> Tensor | None:
    """A boolean mask as the flat bytes that kernels read."""
    return None if token_mask is None else token_mask.reshape(-1).contiguous().view(torch.uint8)


def is_even(tokens: int, width: int, block_tokens: int, block_channels: int) -> bool:
    """Whether every tile is full, so that a kernel needs no bounds."""
    return tokens % block_tokens == 0 and width % block_channels == 0
