"""The Triton engine, which reads z once and is bitwise reproducible, and the functions it shares with fused layers.

Every program of a kernel has its own block of channels, part of the tokens and sums, so partial results are added in a
fixed order.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nalora.activations import Activation
from nalora.kernels.statistics.sums import Bounds, Sums, flatten
from nalora.kernels.statistics.triton_activations import number_and_limit, phi_and_derivative


class Tile(NamedTuple):
    """The tokens and channels that a program computes at a time, and its warps and pipeline stages."""

    tokens: int
    channels: int
    warps: int
    stages: int

    def options(self, z: Tensor, number: int, limit: float) -> dict[str, object]:
        """Return the compile-time arguments of a kernel for this tile and activation."""
        activation = {"NUMBER": number, "LIMITED": limit != float("inf"), "FAST": may_approximate(z)}
        blocks = {"BLOCK_TOKENS": self.tokens, "BLOCK_CHANNELS": self.channels}
        return {**activation, **blocks, "STAGES": self.stages, "num_warps": self.warps}


# The fastest of a sweep on an H200 in bf16: 0.68 of the bandwidth of a copy at 4,096 × 14,336, 0.73 at 16,384.
_TILE = Tile(tokens=8, channels=64, warps=1, stages=3)


@triton.jit
def program_share(tokens, width, tokens_per_part, BLOCK_CHANNELS: tl.constexpr):
    """Return (channels, which of them exist, part, first token, token after the last) of this program."""
    channels = tl.program_id(0) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    part = tl.program_id(1)
    first = part.to(tl.int64) * tokens_per_part
    return channels, channels < width, part, first, tl.minimum(first + tokens_per_part, tokens)


@triton.jit
def add(total, error, k, COMPENSATED: tl.constexpr):
    """Return `total` + k and its rounding error (Kahan): exact for a million terms at four times the additions."""
    if COMPENSATED:
        k -= error
        new = total + k
        return new, (new - total) - k
    return total + k, error


@triton.jit
def count(counts, z, bound, BELOW: tl.constexpr):
    """Return `counts` plus one for every z below (or above) the bound."""
    return counts + tl.where(z < bound, 1, 0) if BELOW else counts + tl.where(z > bound, 1, 0)


@triton.jit
def count_packed(counts, z, bound, BELOW: tl.constexpr):
    """Compute `count` for half-precision z, of which a register holds two: 0.75 instructions per value instead of 2.

    A comparison sets the half of a register where it holds to 0xFFFF; subtracting that adds one to l or to h in an
    integer whose halves are l and h − l. One of four integers holds the counts of all four; since such integers are
    added up in the end, it does not matter where the compiler moves it. `bound` is a tile of z's dtype.
    """
    kind: tl.constexpr = "bf16x2" if z.dtype == tl.bfloat16 else "f16x2"
    compare: tl.constexpr = "set." + ("lt" if BELOW else "gt") + ".u32." + kind
    return tl.inline_asm_elementwise(
        "{ .reg .b32 m, n; " + compare + " m, $4, $6; " + compare + " n, $5, $7;"
        "sub.s32 m, $8, m; sub.s32 m, m, n; add.s32 m, m, $9; add.s32 m, m, $10; add.s32 $0, m, $11;"
        "mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; }",
        "=r,=r,=r,=r,r,r,r,r,r,r,r,r", [z, bound, counts], tl.int32, is_pure=True, pack=4,
    )  # fmt: skip


@triton.jit
def total_count(counts, PACKED: tl.constexpr):
    """Return the sum of a tile of counts."""
    if PACKED:
        low = counts & 65535
        counts = low + (((counts >> 16) + low) & 65535)
    return tl.sum(tl.sum(counts, 0), 0)


@triton.jit
def add_to_part(
    sensitivity_ptr, outside_ptr, total, below, above, part, channels, in_width, width, slots, PACKED: tl.constexpr
):
    """Add a program's tile sums to its own part and slot."""
    at = sensitivity_ptr + part.to(tl.int64) * width + channels
    tl.store(at, tl.load(at, mask=in_width, other=0.0) + tl.sum(total, 0), mask=in_width)
    slot = outside_ptr + (part * slots + tl.program_id(0)) * 2
    tl.store(slot, tl.load(slot) + total_count(below, PACKED))
    tl.store(slot + 1, tl.load(slot + 1) + total_count(above, PACKED))


@triton.jit
def count_tokens(tokens_ptr, mask_ptr, part, first, last, WITH_MASK: tl.constexpr):
    """Add the number of the part's unmasked tokens."""
    counted = tl.maximum(last - first, 0)
    if WITH_MASK:
        lanes = tl.arange(0, 256)
        real = tl.zeros([256], tl.int32)
        for start in range(first, last, 256):
            at = start + lanes
            real += (tl.load(mask_ptr + at, mask=at < last, other=0) != 0).to(tl.int32)
        counted = tl.sum(real, 0).to(tl.int64)
    tl.store(tokens_ptr + part, tl.load(tokens_ptr + part) + counted)


@triton.jit
def _accumulate(
    z_ptr, u_ptr, mask_ptr, sensitivity_ptr, outside_ptr, tokens_ptr,
    tokens, width, slots, tokens_per_part, lower, upper, limit,
    z_stride, z_step, u_stride, u_step,
    NUMBER: tl.constexpr, LIMITED: tl.constexpr, FAST: tl.constexpr, PACKED: tl.constexpr, EVEN: tl.constexpr,
    WITH_U: tl.constexpr, WITH_MASK: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Add Σ|φ′| per channel and the counts of z below and above, of a part of the tokens and a block of channels."""
    channels, in_width, part, first, last = program_share(tokens, width, tokens_per_part, BLOCK_CHANNELS)
    total = tl.zeros([BLOCK_TOKENS, BLOCK_CHANNELS], tl.float32)
    error = tl.zeros([BLOCK_TOKENS, BLOCK_CHANNELS], tl.float32)
    below = tl.zeros([BLOCK_TOKENS, BLOCK_CHANNELS], tl.int32)
    above = tl.zeros([BLOCK_TOKENS, BLOCK_CHANNELS], tl.int32)
    # Replaces masked values: it is in the responsive regime, which is not counted.
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
            inside = (rows < last)[:, None] & in_width[None, :]
            if WITH_MASK:
                inside = inside & (tl.load(mask_ptr + rows, mask=rows < last, other=0) != 0)[:, None]
            loaded = tl.load(z_at, mask=inside, other=neutral)
            u = tl.load(u_at, mask=inside, other=0.0).to(tl.float32) if WITH_U else 1.0
        z = loaded.to(tl.float32)
        _, derivative = phi_and_derivative(z, limit, NUMBER, LIMITED, FAST)
        k = tl.abs(derivative) * tl.abs(u) if WITH_U else tl.abs(derivative)
        if not EVEN:
            k = tl.where(inside, k, 0.0)
        total, error = add(total, error, k, not FAST)
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
    sums: Sums, z: Tensor, activation: Activation, bounds: Bounds, u: Tensor | None = None, mask: Tensor | None = None
) -> None:
    """Compute `reference.accumulate` in one pass over z."""
    known = number_and_limit(activation)
    assert known is not None
    number, limit = known
    z, u, mask = flatten(z, u, mask)
    mask = as_bytes(mask)
    (tokens, width), parts = z.shape, sums.tokens.shape[0]
    part_tokens = tokens_per_part(tokens, parts, _TILE.tokens)
    packed = bounds_for_packing(bounds, z, part_tokens // _TILE.tokens)
    _accumulate[triton.cdiv(width, _TILE.channels), parts](
        z, u, mask, *sums,
        tokens, width, sums.outside.shape[1], part_tokens, *(packed or bounds), limit,
        *z.stride(), *(u.stride() if u is not None else (0, 0)),
        PACKED=packed is not None, EVEN=mask is None and has_full_tiles(z, _TILE),
        WITH_U=u is not None, WITH_MASK=mask is not None, **_TILE.options(z, number, limit),
    )  # fmt: skip


def tokens_per_part(tokens: int, parts: int, block_tokens: int) -> int:
    """Return the number of tokens of a part, a multiple of the tile's."""
    return triton.cdiv(triton.cdiv(tokens, parts), block_tokens) * block_tokens


def as_bytes(mask: Tensor | None) -> Tensor | None:
    """Return a boolean mask as the flat bytes that kernels read."""
    return None if mask is None else mask.reshape(-1).contiguous().view(torch.uint8)


def may_approximate(z: Tensor) -> bool:
    """Return whether the GPU's approximate functions are accurate enough, as they are for half-precision z."""
    return z.is_cuda and z.dtype != torch.float32


def has_full_tiles(z: Tensor, tile: Tile) -> bool:
    """Return whether every tile is full, so that a kernel needs no bounds checks."""
    return z.shape[0] % tile.tokens == 0 and z.shape[1] % tile.channels == 0


def bounds_for_packing(bounds: Bounds, z: Tensor, tiles: int) -> Bounds | None:
    """Return bounds in z's dtype that separate the same z; None if counts cannot be packed.

    Packed counts need half-precision z on a GPU, a value between the bounds to replace masked values, and fewer than
    2¹⁵ tiles of tokens in a part.
    """
    return _bounds_in(z.dtype, *bounds) if may_approximate(z) and tiles < 1 << 15 else None


@functools.cache
def _bounds_in(dtype: torch.dtype, lower: float, upper: float) -> Bounds | None:
    lower, upper = _rounded_up(lower, dtype), -_rounded_up(-upper, dtype)
    return (lower, upper) if lower <= upper else None


def _rounded_up(value: float, dtype: torch.dtype) -> float:
    """Return the smallest number of the dtype that is not below the value."""
    nearest = torch.tensor(value, dtype=torch.float64).to(dtype)
    above = nearest if nearest.item() >= value else torch.nextafter(nearest, torch.full_like(nearest, torch.inf))
    return above.item()
