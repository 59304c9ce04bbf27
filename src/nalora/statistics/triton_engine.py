"""The Triton engine: z is read once, and every program adds to sums of its own, so results repeat to the bit."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nalora.activations import Activation
from nalora.statistics.sums import Sums
from nalora.statistics.triton_activations import number_and_limit, phi_and_derivative

_BLOCK_TOKENS = 16
_BLOCK_CHANNELS = 128
_WARPS = 2


@triton.jit
def _accumulate(
    z_ptr, u_ptr, mask_ptr, sensitivity_ptr, outside_ptr, tokens_ptr,
    tokens, width, slots, tokens_per_part, lower, upper, limit,
    z_stride, z_step, u_stride, u_step,
    NUMBER: tl.constexpr, LIMITED: tl.constexpr, FAST: tl.constexpr, EVEN: tl.constexpr,
    WITH_U: tl.constexpr, WITH_MASK: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr,
):  # fmt: skip
    """One part of the tokens × one block of channels: Σ|φ′| per channel, and how many z lie below and above."""
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
        else:
            here = (rows < last)[:, None] & in_width[None, :]
            if WITH_MASK:
                here = here & (tl.load(mask_ptr + rows, mask=rows < last, other=0) != 0)[:, None]
            z = tl.load(z_at, mask=here, other=0.0).to(tl.float32)
            u = tl.load(u_at, mask=here, other=0.0).to(tl.float32) if WITH_U else z
        _, derivative = phi_and_derivative(z, limit, NUMBER, LIMITED, FAST)
        k = tl.abs(derivative) * tl.abs(u) if WITH_U else tl.abs(derivative)
        # Two counts in one integer: below in the lower half, above in the upper.
        beyond = tl.where(z < lower, 1, 0) + tl.where(z > upper, 65536, 0)
        if not EVEN:
            k = tl.where(here, k, 0.0)
            beyond = tl.where(here, beyond, 0)
        total += k
        outside += beyond
    add_to_part(sensitivity_ptr, outside_ptr, total, outside, part, channels, in_width, width, slots)
    if tl.program_id(0) == 0:
        count_tokens(tokens_ptr, mask_ptr, part, first, last, WITH_MASK)


@triton.jit
def add_to_part(sensitivity_ptr, outside_ptr, total, outside, part, channels, in_width, width, slots):
    """Add a program's tile sums to the part and slot that are its alone."""
    at = sensitivity_ptr + part.to(tl.int64) * width + channels
    tl.store(at, tl.load(at, mask=in_width, other=0.0) + tl.sum(total, 0), mask=in_width)
    slot = outside_ptr + (part * slots + tl.program_id(0)) * 2
    tl.store(slot, tl.load(slot) + tl.sum(tl.sum(outside & 65535, 0), 0))
    tl.store(slot + 1, tl.load(slot + 1) + tl.sum(tl.sum(outside >> 16, 0), 0))


@triton.jit
def count_tokens(tokens_ptr, mask_ptr, part, first, last, WITH_MASK: tl.constexpr):
    """Add the part's real tokens."""
    counted = tl.maximum(last - first, 0)
    if WITH_MASK:
        lanes = tl.arange(0, 256)
        real = tl.zeros([256], tl.int32)
        for start in range(first, last, 256):
            at = start + lanes
            real += (tl.load(mask_ptr + at, mask=at < last, other=0) != 0).to(tl.int32)
        counted = tl.sum(real, 0).to(tl.int64)
    tl.store(tokens_ptr + part, tl.load(tokens_ptr + part) + counted)


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
    mask = as_bytes(token_mask)
    tokens, parts = z.shape[0], sums.tokens.shape[0]
    number, limit = known
    _accumulate[triton.cdiv(width, _BLOCK_CHANNELS), parts](
        z, u, mask, *sums,
        tokens, width, sums.outside.shape[1], tokens_per_part(tokens, parts, _BLOCK_TOKENS), *thresholds, limit,
        *z.stride(), *(u.stride() if u is not None else (0, 0)),
        NUMBER=number, LIMITED=limit != float("inf"), FAST=may_approximate(z),
        EVEN=mask is None and is_even(tokens, width, _BLOCK_TOKENS, _BLOCK_CHANNELS),
        WITH_U=u is not None, WITH_MASK=mask is not None,
        BLOCK_TOKENS=_BLOCK_TOKENS, BLOCK_CHANNELS=_BLOCK_CHANNELS, num_warps=_WARPS,
    )  # fmt: skip


def tokens_per_part(tokens: int, parts: int, block_tokens: int) -> int:
    """How many tokens a part gets, in whole tiles."""
    return triton.cdiv(triton.cdiv(tokens, parts), block_tokens) * block_tokens


def as_bytes(token_mask: Tensor | None) -> Tensor | None:
    """A boolean mask as the flat bytes that kernels read."""
    return None if token_mask is None else token_mask.reshape(-1).contiguous().view(torch.uint8)


def may_approximate(z: Tensor) -> bool:
    """Whether the hardware's reciprocal is good enough: for half-precision z it is, and only a GPU has it."""
    return z.is_cuda and z.dtype != torch.float32


def is_even(tokens: int, width: int, block_tokens: int, block_channels: int) -> bool:
    """Whether every tile is full, so that a kernel needs no bounds."""
    return tokens % block_tokens == 0 and width % block_channels == 0
