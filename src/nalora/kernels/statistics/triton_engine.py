"""The Triton engine: z is read once, and every program adds to sums of its own, so results repeat to the bit."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nalora.activations import Activation
from nalora.kernels.statistics.sums import Sums
from nalora.kernels.statistics.triton_activations import number_and_limit, phi_and_derivative
from nalora.kernels.statistics.triton_sums import (
    add,
    add_to_part,
    as_bytes,
    bounds_for_packing,
    count,
    count_packed,
    count_tokens,
    is_even,
    may_approximate,
    my_share,
    tokens_per_part,
)

# The best of a sweep on an H200 in bf16: 0.68 of the bandwidth of a copy at 4,096 × 14,336, 0.73 at 16,384.
_BLOCK_TOKENS = 8
_BLOCK_CHANNELS = 64
_WARPS = 1
_STAGES = 3


@triton.jit
def _accumulate(
    z_ptr, u_ptr, mask_ptr, sensitivity_ptr, outside_ptr, tokens_ptr,
    tokens, width, slots, tokens_per_part, lower, upper, limit,
    z_stride, z_step, u_stride, u_step,
    NUMBER: tl.constexpr, LIMITED: tl.constexpr, FAST: tl.constexpr, PACKED: tl.constexpr, EVEN: tl.constexpr,
    WITH_U: tl.constexpr, WITH_MASK: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One part of the tokens × one block of channels: Σ|φ′| per channel, and how many z lie below and above."""
    channels, in_width, part, first, last = my_share(tokens, width, tokens_per_part, BLOCK_CHANNELS)
    total = tl.zeros([BLOCK_TOKENS, BLOCK_CHANNELS], tl.float32)
    lost = tl.zeros([BLOCK_TOKENS, BLOCK_CHANNELS], tl.float32)
    below = tl.zeros([BLOCK_TOKENS, BLOCK_CHANNELS], tl.int32)
    above = tl.zeros([BLOCK_TOKENS, BLOCK_CHANNELS], tl.int32)
    # Stands for what is masked out: it lies in no regime that is counted.
    neutral = tl.minimum(tl.maximum(0.0, lower), upper).to(z_ptr.dtype.element_ty)
    lower_tile = tl.full([BLOCK_TOKENS, BLOCK_CHANNELS], lower, z_ptr.dtype.element_ty)
    upper_tile = tl.full([BLOCK_TOKENS, BLOCK_CHANNELS], upper, z_ptr.dtype.element_ty)
    for start in tl.range(first, last, BLOCK_TOKENS, num_stages=STAGES):
        rows = start + tl.arange(0, BLOCK_TOKENS).to(tl.int64)
        z_at = z_ptr + rows[:, None] * z_stride + channels[None, :] * z_step
        u_at = u_ptr + rows[:, None] * u_stride + channels[None, :] * u_step if WITH_U else z_at
        if EVEN:
            loaded = tl.load(z_at)
            u = tl.load(u_at).to(tl.float32) if WITH_U else 1.0
        else:
            here = (rows < last)[:, None] & in_width[None, :]
            if WITH_MASK:
                here = here & (tl.load(mask_ptr + rows, mask=rows < last, other=0) != 0)[:, None]
            loaded = tl.load(z_at, mask=here, other=neutral)
            u = tl.load(u_at, mask=here, other=0.0).to(tl.float32) if WITH_U else 1.0
        z = loaded.to(tl.float32)
        _, derivative = phi_and_derivative(z, limit, NUMBER, LIMITED, FAST)
        k = tl.abs(derivative) * tl.abs(u) if WITH_U else tl.abs(derivative)
        if not EVEN:
            k = tl.where(here, k, 0.0)
        total, lost = add(total, lost, k, not FAST)
        if PACKED:
            below = count_packed(below, loaded, lower_tile, True)
            above = count_packed(above, loaded, upper_tile, False)
        else:
            below = count(below, z, lower, True)
            above = count(above, z, upper, False)
    add_to_part(sensitivity_ptr, outside_ptr, total, below, above, part, channels, in_width, width, slots, PACKED)
    if tl.program_id(0) == 0:
        count_tokens(tokens_ptr, mask_ptr, part, first, last, WITH_MASK)


def accumulate(
    sums: Sums,
    z: Tensor,
    activation: Activation,
    thresholds: tuple[float, float],
    u: Tensor | None = None,
    token_mask: Tensor | None = None,
) -> None:
    """Add the tokens of z to `sums`, as `nalora.kernels.statistics.reference.accumulate` does, in one pass over z."""
    known = number_and_limit(activation)
    assert known is not None
    width = z.shape[-1]
    z, u = z.reshape(-1, width), None if u is None else u.reshape(-1, width)
    mask = as_bytes(token_mask)
    tokens, parts = z.shape[0], sums.tokens.shape[0]
    each_part = tokens_per_part(tokens, parts, _BLOCK_TOKENS)
    packed = bounds_for_packing(thresholds, z, each_part // _BLOCK_TOKENS)
    number, limit = known
    _accumulate[triton.cdiv(width, _BLOCK_CHANNELS), parts](
        z, u, mask, *sums,
        tokens, width, sums.outside.shape[1], each_part, *(packed or thresholds), limit,
        *z.stride(), *(u.stride() if u is not None else (0, 0)),
        NUMBER=number, LIMITED=limit != float("inf"), FAST=may_approximate(z), PACKED=packed is not None,
        EVEN=mask is None and is_even(tokens, width, _BLOCK_TOKENS, _BLOCK_CHANNELS),
        WITH_U=u is not None, WITH_MASK=mask is not None,
        BLOCK_TOKENS=_BLOCK_TOKENS, BLOCK_CHANNELS=_BLOCK_CHANNELS, STAGES=_STAGES, num_warps=_WARPS,
    )  # fmt: skip
