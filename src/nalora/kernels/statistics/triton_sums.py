"""How the programs of a Triton kernel divide tokens and channels, count regimes, and add to their own sums.

Every program has its own block of channels and part of the tokens, so partial results are added in a fixed order and
are bitwise reproducible.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nalora.kernels.statistics.sums import Bounds


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


def tokens_per_part(tokens: int, parts: int, block_tokens: int) -> int:
    """Return the number of tokens of a part, a multiple of the tile's."""
    return triton.cdiv(triton.cdiv(tokens, parts), block_tokens) * block_tokens


def as_bytes(mask: Tensor | None) -> Tensor | None:
    """Return a boolean mask as the flat bytes that kernels read."""
    return None if mask is None else mask.reshape(-1).contiguous().view(torch.uint8)


def may_approximate(z: Tensor) -> bool:
    """Return whether the GPU's approximate functions are accurate enough, as they are for half-precision z."""
    return z.is_cuda and z.dtype != torch.float32


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
