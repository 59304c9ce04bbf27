"""Triton kernels of h = φ(z) ⊙ (u + b), with z = z₀ + x_g·B_gᵀ and u = u₀ + x_u·B_uᵀ formed in registers.

Forward reads z₀ and u₀ once and writes h; the statistics come along. Backward reads z₀, u₀ and the gradient of h
once and writes those of z and u; the three low-rank weight gradients that need z, u or h are accumulated on the way.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nalora.kernels.statistics.triton_activations import phi_and_derivative
from nalora.kernels.statistics.triton_sums import add, add_to_part, count, count_tokens, my_share


@triton.jit
def _low_rank(x_ptr, rows, there, x_stride, RANK: tl.constexpr, R: tl.constexpr):
    """[tokens, R] of the projected inputs, zero beyond the rank."""
    j = tl.arange(0, R)
    return tl.load(x_ptr + rows[:, None] * x_stride + j[None, :], mask=there[:, None] & (j < RANK)[None, :], other=0.0)


@triton.jit
def _factor(b_ptr, channels, in_width, RANK: tl.constexpr, R: tl.constexpr):
    """[R, channels] of a factor stored as [channels, rank]."""
    j = tl.arange(0, R)
    at = b_ptr + channels[None, :] * RANK + j[:, None]
    return tl.load(at, mask=in_width[None, :] & (j < RANK)[:, None], other=0.0)


@triton.jit
def forward_kernel(
    z_ptr, u_ptr, h_ptr, mask_ptr, xg_ptr, xu_ptr, bg_ptr, bu_ptr, sensitivity_ptr, outside_ptr, tokens_ptr,
    tokens, width, slots, tokens_per_part, lower, upper, limit, up_offset,
    z_stride, u_stride, x_stride,
    NUMBER: tl.constexpr, LIMITED: tl.constexpr, FAST: tl.constexpr, EVEN: tl.constexpr,
    COUNT: tl.constexpr, UTILITY: tl.constexpr, WITH_MASK: tl.constexpr, RANK: tl.constexpr, R: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """h of a part of the tokens and a block of channels, its Σ|φ′| per channel, and how many z lie below and above."""
    channels, in_width, part, first, last = my_share(tokens, width, tokens_per_part, BLOCK_CHANNELS)
    b_gate = _factor(bg_ptr, channels, in_width, RANK, R)
    b_up = _factor(bu_ptr, channels, in_width, RANK, R)
    total = tl.zeros([BLOCK_TOKENS, BLOCK_CHANNELS], tl.float32)
    lost = tl.zeros([BLOCK_TOKENS, BLOCK_CHANNELS], tl.float32)
    below = tl.zeros([BLOCK_TOKENS, BLOCK_CHANNELS], tl.int32)
    above = tl.zeros([BLOCK_TOKENS, BLOCK_CHANNELS], tl.int32)
    # Stands for what does not count: it lies in no regime that is counted.
    neutral = tl.minimum(tl.maximum(0.0, lower), upper)
    for start in tl.range(first, last, BLOCK_TOKENS, num_stages=STAGES):
        rows = start + tl.arange(0, BLOCK_TOKENS).to(tl.int64)
        there = rows < last
        here = there[:, None] & in_width[None, :]
        z = _tile(z_ptr, rows, channels, z_stride, here, EVEN)
        u = _tile(u_ptr, rows, channels, u_stride, here, EVEN)
        z = tl.dot(_low_rank(xg_ptr, rows, there, x_stride, RANK, R), b_gate, acc=z, input_precision="ieee")
        u = tl.dot(_low_rank(xu_ptr, rows, there, x_stride, RANK, R), b_up, acc=u, input_precision="ieee")
        u += up_offset
        phi, derivative = phi_and_derivative(z, limit, NUMBER, LIMITED, FAST)
        _put(h_ptr, rows, channels, width, phi * u, here, EVEN)
        if COUNT:
            k = tl.abs(derivative) * tl.abs(u) if UTILITY else tl.abs(derivative)
            if WITH_MASK:
                counted = there & (tl.load(mask_ptr + rows, mask=there, other=0) != 0)
                here = counted[:, None] & in_width[None, :]
            if WITH_MASK or not EVEN:
                k = tl.where(here, k, 0.0)
                z = tl.where(here, z, neutral)
            total, lost = add(total, lost, k, not FAST)
            below = count(below, z, lower, True)
            above = count(above, z, upper, False)
    if COUNT:
        add_to_part(sensitivity_ptr, outside_ptr, total, below, above, part, channels, in_width, width, slots, False)
        if tl.program_id(0) == 0:
            count_tokens(tokens_ptr, mask_ptr, part, first, last, WITH_MASK)


@triton.jit
def _tile(ptr, rows, channels, stride, here, EVEN: tl.constexpr):
    """A tile of a matrix in float32, zero beyond its bounds."""
    at = ptr + rows[:, None] * stride + channels[None, :]
    if EVEN:
        return tl.load(at).to(tl.float32)
    return tl.load(at, mask=here, other=0.0).to(tl.float32)


@triton.jit
def _put(ptr, rows, channels, stride, values, here, EVEN: tl.constexpr):
    """Write a tile in the matrix's own precision."""
    at = ptr + rows[:, None] * stride + channels[None, :]
    if EVEN:
        tl.store(at, values.to(ptr.dtype.element_ty))
    else:
        tl.store(at, values.to(ptr.dtype.element_ty), mask=here)


@triton.jit
def backward_kernel(
    dh_ptr, z_ptr, u_ptr, dz_ptr, du_ptr, xg_ptr, xu_ptr, e_ptr, bg_ptr, bu_ptr, ad_ptr,
    dbg_ptr, dbu_ptr, dad_ptr,
    tokens, width, tokens_per_part, limit, up_offset,
    z_stride, u_stride, x_stride, dh_stride,
    NUMBER: tl.constexpr, LIMITED: tl.constexpr, FAST: tl.constexpr, EVEN: tl.constexpr,
    RANK: tl.constexpr, R: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of z and u of a part of the tokens and a block of channels, and their share of B_g, B_u and A_d."""
    channels, in_width, part, first, last = my_share(tokens, width, tokens_per_part, BLOCK_CHANNELS)
    j = tl.arange(0, R)
    in_factor = in_width[None, :] & (j < RANK)[:, None]
    b_gate = _factor(bg_ptr, channels, in_width, RANK, R)
    b_up = _factor(bu_ptr, channels, in_width, RANK, R)
    a_down = tl.load(ad_ptr + j[:, None] * width + channels[None, :], mask=in_factor, other=0.0)
    d_gate = tl.zeros([R, BLOCK_CHANNELS], tl.float32)
    d_up = tl.zeros([R, BLOCK_CHANNELS], tl.float32)
    d_down = tl.zeros([R, BLOCK_CHANNELS], tl.float32)
    for start in tl.range(first, last, BLOCK_TOKENS, num_stages=STAGES):
        rows = start + tl.arange(0, BLOCK_TOKENS).to(tl.int64)
        there = rows < last
        here = there[:, None] & in_width[None, :]
        z = _tile(z_ptr, rows, channels, z_stride, here, EVEN)
        u = _tile(u_ptr, rows, channels, u_stride, here, EVEN)
        dh = _tile(dh_ptr, rows, channels, dh_stride, here, EVEN)
        x_gate = _low_rank(xg_ptr, rows, there, x_stride, RANK, R)
        x_up = _low_rank(xu_ptr, rows, there, x_stride, RANK, R)
        e = _low_rank(e_ptr, rows, there, RANK, RANK, R)
        z = tl.dot(x_gate, b_gate, acc=z, input_precision="ieee")
        u = tl.dot(x_up, b_up, acc=u, input_precision="ieee")
        dh = tl.dot(e, a_down, acc=dh, input_precision="ieee")
        u += up_offset
        phi, derivative = phi_and_derivative(z, limit, NUMBER, LIMITED, FAST)
        dz = dh * u * derivative
        du = dh * phi
        _put(dz_ptr, rows, channels, width, dz, here, EVEN)
        _put(du_ptr, rows, channels, width, du, here, EVEN)
        # Rows beyond the end carry zeros in x and e, channels beyond the width are not stored.
        d_gate = tl.dot(tl.trans(x_gate), dz.to(x_gate.dtype), acc=d_gate, input_precision="ieee")
        d_up = tl.dot(tl.trans(x_up), du.to(x_up.dtype), acc=d_up, input_precision="ieee")
        d_down = tl.dot(tl.trans(e), (phi * u).to(e.dtype), acc=d_down, input_precision="ieee")
    at = part.to(tl.int64) * RANK * width + j[:, None] * width + channels[None, :]
    tl.store(dbg_ptr + at, d_gate, mask=in_factor)
    tl.store(dbu_ptr + at, d_up, mask=in_factor)
    tl.store(dad_ptr + at, d_down, mask=in_factor)
