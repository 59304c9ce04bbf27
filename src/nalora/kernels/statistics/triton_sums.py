"""How the programs of a Triton kernel share out tokens and channels, count regimes, and add to sums of their own.

Every program owns a block of channels and a part of the tokens, so partial results are added up in a fixed order and
repeat to the bit.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def my_share(tokens, width, tokens_per_part, BLOCK_CHANNELS: tl.constexpr):
    """(channels, which of them exist, part, first token, token after the last) of this program."""
    channels = tl.program_id(0) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    part = tl.program_id(1)
    first = part.to(tl.int64) * tokens_per_part
    return channels, channels < width, part, first, tl.minimum(first + tokens_per_part, tokens)


@triton.jit
def add(total, lost, k, COMPENSATED: tl.constexpr):
    """`total` + k and what rounding lost of it (Kahan): a million float32 terms sum to the last digit, at four times
    the additions."""
    if COMPENSATED:
        k -= lost
        new = total + k
        return new, (new - total) - k
    return total + k, lost


@triton.jit
def count(counts, z, bound, BELOW: tl.constexpr):
    """`counts` with one added for every z below (or above) the bound."""
    return counts + tl.where(z < bound, 1, 0) if BELOW else counts + tl.where(z > bound, 1, 0)


@triton.jit
def count_packed(counts, z, bound, BELOW: tl.constexpr):
    """The same for half-precision z as it lies in registers, two in each: 0.75 instructions a value in place of 2.

    A comparison leaves 0xFFFF in the half of a register where it holds; subtracting that adds one to l or to h in
    an integer whose halves are l and h − l. One of four integers carries the counts of all four, and is found again
    wherever the compiler moved it, since such integers add up. `bound` is a tile of z's dtype.
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
    """The sum of a tile of counts."""
    if PACKED:
        low = counts & 65535
        counts = low + (((counts >> 16) + low) & 65535)
    return tl.sum(tl.sum(counts, 0), 0)


@triton.jit
def add_to_part(
    sensitivity_ptr, outside_ptr, total, below, above, part, channels, in_width, width, slots, PACKED: tl.constexpr
):
    """Add a program's tile sums to the part and slot that are its alone."""
    at = sensitivity_ptr + part.to(tl.int64) * width + channels
    tl.store(at, tl.load(at, mask=in_width, other=0.0) + tl.sum(total, 0), mask=in_width)
    slot = outside_ptr + (part * slots + tl.program_id(0)) * 2
    tl.store(slot, tl.load(slot) + total_count(below, PACKED))
    tl.store(slot + 1, tl.load(slot + 1) + total_count(above, PACKED))


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


def tokens_per_part(tokens: int, parts: int, block_tokens: int) -> int:
    """How many tokens a part gets, in whole tiles."""
    return triton.cdiv(triton.cdiv(tokens, parts), block_tokens) * block_tokens


def as_bytes(token_mask: Tensor | None) -> Tensor | None:
    """A boolean mask as the flat bytes that kernels read."""
    return None if token_mask is None else token_mask.reshape(-1).contiguous().view(torch.uint8)


def may_approximate(z: Tensor) -> bool:
    """Whether a GPU's own approximations are good enough: for half-precision z they are."""
    return z.is_cuda and z.dtype != torch.float32


def is_even(tokens: int, width: int, block_tokens: int, block_channels: int) -> bool:
    """Whether every tile is full, so that a kernel needs no bounds."""
    return tokens % block_tokens == 0 and width % block_channels == 0


def bounds_for_packing(thresholds: tuple[float, float], z: Tensor, tiles: int) -> tuple[float, float] | None:
    """Bounds in z's dtype that tell the same z apart as the thresholds do; None where counts cannot be packed.

    Packed counts need half-precision z on a GPU, a value between the bounds to stand for what is masked out, and
    fewer than 2¹⁵ tiles of tokens in a part.
    """
    return _bounds_in(z.dtype, *thresholds) if may_approximate(z) and tiles < 1 << 15 else None


@functools.cache
def _bounds_in(dtype: torch.dtype, lower: float, upper: float) -> tuple[float, float] | None:
    lower, upper = _rounded_up(lower, dtype), -_rounded_up(-upper, dtype)
    return (lower, upper) if lower <= upper else None


def _rounded_up(value: float, dtype: torch.dtype) -> float:
    """The smallest number of the dtype that is not below the value."""
    nearest = torch.tensor(value, dtype=torch.float64).to(dtype)
    above = nearest if nearest.item() >= value else torch.nextafter(nearest, torch.full_like(nearest, torch.inf))
    return above.item()
