"""h = φ(z) ⊙ (u + b) as one operator that also adds to the statistics of z.

The Triton kernels compute z = z₀ + x_g·B_gᵀ and u = u₀ + x_u·B_uᵀ in registers. Forward reads z₀ and u₀ once and
writes h. Backward reads z₀, u₀ and the gradient of h once and writes those of z and u; it also accumulates the three
low-rank weight gradients that need z, u or h. At high ranks those would not fit into registers: there the caller adds
the low-rank terms by matrix products, z and u are complete, and backward writes h for the gradient that needs it.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nalora.kernels.statistics.sums import Sums
from nalora.kernels.statistics.triton_activations import phi_and_derivative
from nalora.kernels.statistics.triton_engine import (
    Tile,
    add,
    add_to_part,
    count,
    count_tokens,
    has_full_tiles,
    program_share,
    tokens_per_part,
)

_PROGRAMS = 2048
# The fastest of a sweep on an H200 at 4,096 × 14,336 in bf16 and a rank of 8.
_FORWARD = Tile(16, 64, 2, 3)
_BACKWARD = Tile(64, 64, 4, 3)
# At ranks of 17 to 32 the tile above keeps 336 bytes of a thread in local memory, this one none.
_BACKWARD_HIGH_RANK = Tile(32, 64, 4, 3)
# Three gradients of 64 channels in float32 take 48 registers of each of 128 threads at a rank of 32, 96 at 64.
MOST_IN_REGISTERS = 32


class GateSpec(NamedTuple):
    """A block's activation, the bounds of its regimes, the offset b of u, and whether |φ′| is multiplied by |u|."""

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


def tile_of(direction: Literal["forward", "backward"], rank: int) -> Tile:
    """Return the tile of a kernel for adapters of a rank, 0 if it computes complete z and u."""
    if direction == "forward":
        return _FORWARD
    return _BACKWARD if rank <= 16 else _BACKWARD_HIGH_RANK


@triton.jit
def _low_rank(x_ptr, rows, valid, x_stride, RANK: tl.constexpr, R: tl.constexpr):
    """Load a [tokens, R] tile of the projected inputs, zero beyond the rank."""
    j = tl.arange(0, R)
    return tl.load(x_ptr + rows[:, None] * x_stride + j[None, :], mask=valid[:, None] & (j < RANK)[None, :], other=0.0)


@triton.jit
def _factor(b_ptr, channels, in_width, RANK: tl.constexpr, R: tl.constexpr):
    """Load an [R, channels] tile of a factor stored as [channels, rank]."""
    j = tl.arange(0, R)
    at = b_ptr + channels[None, :] * RANK + j[:, None]
    return tl.load(at, mask=in_width[None, :] & (j < RANK)[:, None], other=0.0)


@triton.jit
def _tile(ptr, rows, channels, stride, inside, EVEN: tl.constexpr):
    """Load a tile of a matrix in float32, zero beyond its bounds."""
    at = ptr + rows[:, None] * stride + channels[None, :]
    if EVEN:
        return tl.load(at).to(tl.float32)
    return tl.load(at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _store(ptr, rows, channels, stride, values, inside, EVEN: tl.constexpr):
    """Store a tile in the matrix's dtype."""
    at = ptr + rows[:, None] * stride + channels[None, :]
    if EVEN:
        tl.store(at, values.to(ptr.dtype.element_ty))
    else:
        tl.store(at, values.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def _forward_kernel(
    z_ptr, u_ptr, h_ptr, mask_ptr, xg_ptr, xu_ptr, bg_ptr, bu_ptr, sensitivity_ptr, outside_ptr, tokens_ptr,
    tokens, width, slots, tokens_per_part, lower, upper, limit, up_offset,
    z_stride, u_stride, x_stride,
    NUMBER: tl.constexpr, LIMITED: tl.constexpr, FAST: tl.constexpr, EVEN: tl.constexpr,
    COUNT: tl.constexpr, UTILITY: tl.constexpr, WITH_MASK: tl.constexpr, RANK: tl.constexpr, R: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write h of a part of the tokens and a block of channels; add Σ|φ′| per channel and the counts of z outside."""
    channels, in_width, part, first, last = program_share(tokens, width, tokens_per_part, BLOCK_CHANNELS)
    if RANK > 0:
        b_gate = _factor(bg_ptr, channels, in_width, RANK, R)
        b_up = _factor(bu_ptr, channels, in_width, RANK, R)
    total = tl.zeros([BLOCK_TOKENS, BLOCK_CHANNELS], tl.float32)
    error = tl.zeros([BLOCK_TOKENS, BLOCK_CHANNELS], tl.float32)
    below = tl.zeros([BLOCK_TOKENS, BLOCK_CHANNELS], tl.int32)
    above = tl.zeros([BLOCK_TOKENS, BLOCK_CHANNELS], tl.int32)
    # Replaces masked values: it is in the responsive regime, which is not counted.
    neutral = tl.minimum(tl.maximum(0.0, lower), upper)
    for start in tl.range(first, last, BLOCK_TOKENS, num_stages=STAGES):
        rows = start + tl.arange(0, BLOCK_TOKENS).to(tl.int64)
        valid = rows < last
        inside = valid[:, None] & in_width[None, :]
        z = _tile(z_ptr, rows, channels, z_stride, inside, EVEN)
        u = _tile(u_ptr, rows, channels, u_stride, inside, EVEN)
        if RANK > 0:
            z = tl.dot(_low_rank(xg_ptr, rows, valid, x_stride, RANK, R), b_gate, acc=z, input_precision="ieee")
            u = tl.dot(_low_rank(xu_ptr, rows, valid, x_stride, RANK, R), b_up, acc=u, input_precision="ieee")
        u += up_offset
        phi, derivative = phi_and_derivative(z, limit, NUMBER, LIMITED, FAST)
        _store(h_ptr, rows, channels, width, phi * u, inside, EVEN)
        if COUNT:
            k = tl.abs(derivative) * tl.abs(u) if UTILITY else tl.abs(derivative)
            if WITH_MASK:
                counted = valid & (tl.load(mask_ptr + rows, mask=valid, other=0) != 0)
                inside = counted[:, None] & in_width[None, :]
            if WITH_MASK or not EVEN:
                k = tl.where(inside, k, 0.0)
                z = tl.where(inside, z, neutral)
            total, error = add(total, error, k, not FAST)
            below = count(below, z, lower, True)
            above = count(above, z, upper, False)
    if COUNT:
        add_to_part(sensitivity_ptr, outside_ptr, total, below, above, part, channels, in_width, width, slots, False)
        if tl.program_id(0) == 0:
            count_tokens(tokens_ptr, mask_ptr, part, first, last, WITH_MASK)


@triton.jit
def _backward_kernel(
    dh_ptr, z_ptr, u_ptr, dz_ptr, du_ptr, xg_ptr, xu_ptr, e_ptr, bg_ptr, bu_ptr, ad_ptr,
    dbg_ptr, dbu_ptr, dad_ptr, h_ptr,
    tokens, width, tokens_per_part, limit, up_offset,
    z_stride, u_stride, x_stride, dh_stride, out_stride,
    NUMBER: tl.constexpr, LIMITED: tl.constexpr, FAST: tl.constexpr, EVEN: tl.constexpr,
    RANK: tl.constexpr, R: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write the gradients of z, u, B_g, B_u and A_d of a part of the tokens and a block of channels.

    With a rank of 0 write those of z and u, and h.
    """
    channels, in_width, part, first, last = program_share(tokens, width, tokens_per_part, BLOCK_CHANNELS)
    j = tl.arange(0, R)
    in_factor = in_width[None, :] & (j < RANK)[:, None]
    if RANK > 0:
        b_gate = _factor(bg_ptr, channels, in_width, RANK, R)
        b_up = _factor(bu_ptr, channels, in_width, RANK, R)
        a_down = tl.load(ad_ptr + j[:, None] * width + channels[None, :], mask=in_factor, other=0.0)
        d_gate = tl.zeros([R, BLOCK_CHANNELS], tl.float32)
        d_up = tl.zeros([R, BLOCK_CHANNELS], tl.float32)
        d_down = tl.zeros([R, BLOCK_CHANNELS], tl.float32)
    for start in tl.range(first, last, BLOCK_TOKENS, num_stages=STAGES):
        rows = start + tl.arange(0, BLOCK_TOKENS).to(tl.int64)
        valid = rows < last
        inside = valid[:, None] & in_width[None, :]
        z = _tile(z_ptr, rows, channels, z_stride, inside, EVEN)
        u = _tile(u_ptr, rows, channels, u_stride, inside, EVEN)
        dh = _tile(dh_ptr, rows, channels, dh_stride, inside, EVEN)
        if RANK > 0:
            x_gate = _low_rank(xg_ptr, rows, valid, x_stride, RANK, R)
            x_up = _low_rank(xu_ptr, rows, valid, x_stride, RANK, R)
            e = _low_rank(e_ptr, rows, valid, RANK, RANK, R)
            z = tl.dot(x_gate, b_gate, acc=z, input_precision="ieee")
            u = tl.dot(x_up, b_up, acc=u, input_precision="ieee")
            dh = tl.dot(e, a_down, acc=dh, input_precision="ieee")
        u += up_offset
        phi, derivative = phi_and_derivative(z, limit, NUMBER, LIMITED, FAST)
        dz = dh * u * derivative
        du = dh * phi
        _store(dz_ptr, rows, channels, out_stride, dz, inside, EVEN)
        _store(du_ptr, rows, channels, out_stride, du, inside, EVEN)
        if RANK > 0:
            # Rows beyond the end are zero in x and e; channels beyond the width are not stored.
            d_gate = tl.dot(tl.trans(x_gate), dz.to(x_gate.dtype), acc=d_gate, input_precision="ieee")
            d_up = tl.dot(tl.trans(x_up), du.to(x_up.dtype), acc=d_up, input_precision="ieee")
            d_down = tl.dot(tl.trans(e), (phi * u).to(e.dtype), acc=d_down, input_precision="ieee")
        else:
            _store(h_ptr, rows, channels, width, phi * u, inside, EVEN)
    if RANK > 0:
        at = part.to(tl.int64) * RANK * width + j[:, None] * width + channels[None, :]
        tl.store(dbg_ptr + at, d_gate, mask=in_factor)
        tl.store(dbu_ptr + at, d_up, mask=in_factor)
        tl.store(dad_ptr + at, d_down, mask=in_factor)


def forward(
    z: Tensor,
    u: Tensor,
    spec: GateSpec,
    low_rank: LowRank | None,
    sums: Sums | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Return h for z₀ and u₀ of shape [tokens, width]; add the unmasked tokens to `sums`, if given.

    Without `low_rank`, z and u are complete.
    """
    tokens, width = z.shape
    tile = tile_of("forward", low_rank.b_gate.shape[1] if low_rank else 0)
    parts = sums.tokens.shape[0] if sums else _parts(tokens, width, tile)
    h = torch.empty(tokens, width, dtype=z.dtype, device=z.device)
    _forward_kernel[triton.cdiv(width, tile.channels), parts](
        z, u, h, mask, *(low_rank or (None,) * 4), *(sums or (None,) * 3),
        tokens, width, sums.outside.shape[1] if sums else 0, tokens_per_part(tokens, parts, tile.tokens),
        spec.lower, spec.upper, spec.limit, spec.up_offset,
        z.stride(0), u.stride(0), low_rank.x_gate.stride(0) if low_rank else 0,
        COUNT=sums is not None, UTILITY=spec.utility, WITH_MASK=mask is not None,
        **_options(tile, z, spec, low_rank),
    )  # fmt: skip
    return h


class Gradients(NamedTuple):
    """Gradients of z and u, and of the low-rank factors whose gradients need z, u or h."""

    z: Tensor
    u: Tensor
    b_gate: Tensor
    b_up: Tensor
    a_down: Tensor


def backward(
    dh: Tensor,
    z: Tensor,
    u: Tensor,
    spec: GateSpec,
    low_rank: LowRank,
    down: tuple[Tensor, Tensor],
    *,
    together: bool = False,
    overwrite: bool = False,
) -> Gradients:
    """Return the gradients for dh of shape [tokens, width].

    Args:
        dh: gradient of h without the down adapter's share; unless `together`, the gradient of z overwrites it.
        z: z₀ as given to `forward`.
        u: u₀ as given to `forward`.
        spec: the block.
        low_rank: as given to `forward`.
        down: (e, A_d): the output's gradient through the scaled B_d, [tokens, rank], and A_d, [rank, width].
        together: whether the gradients of z and u are the halves of one matrix.
        overwrite: whether u is not needed any more; unless `together`, its gradient then overwrites it.
    """
    rank = low_rank.b_gate.shape[1]
    parts = _parts(*z.shape, tile_of("backward", rank))
    e, a_down = down
    factors = [torch.empty(parts, rank, z.shape[1], dtype=torch.float32, device=z.device) for _ in range(3)]
    x_gate, x_up, b_gate, b_up = low_rank
    dz, du = _outputs(dh, u, together, overwrite)
    pointers = (x_gate, x_up, e, b_gate, b_up, a_down, *factors, None)
    _launch_backward(dh, z, u, dz, du, spec, low_rank, pointers)
    d_gate, d_up, d_down = (parts_of_factor.sum(0) for parts_of_factor in factors)
    return Gradients(dz, du, d_gate.T, d_up.T, d_down)


def backward_of_complete(
    dh: Tensor, z: Tensor, u: Tensor, spec: GateSpec, *, together: bool = False, overwrite: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of z and u, and h, for complete z, u and dh; the other arguments are those of `backward`.

    With `overwrite`, h overwrites z.
    """
    dz, du = _outputs(dh, u, together, overwrite)
    h = z if overwrite and z.is_contiguous() else torch.empty_like(u)
    _launch_backward(dh, z, u, dz, du, spec, None, (*(None,) * 9, h))
    return dz, du, h


def _outputs(dh: Tensor, u: Tensor, together: bool, overwrite: bool) -> tuple[Tensor, Tensor]:
    if not together:
        # A program reads its tile before it writes it.
        return dh, u if overwrite and u.stride() == dh.stride() and u.dtype == dh.dtype else torch.empty_like(dh)
    tokens, width = dh.shape
    left, right = torch.empty(tokens, 2 * width, dtype=dh.dtype, device=dh.device).split(width, dim=1)
    return left, right


def _launch_backward(
    dh: Tensor, z: Tensor, u: Tensor, dz: Tensor, du: Tensor, spec: GateSpec, low_rank: LowRank | None, pointers
) -> None:
    tokens, width = z.shape
    tile = tile_of("backward", low_rank.b_gate.shape[1] if low_rank else 0)
    parts = _parts(tokens, width, tile)
    _backward_kernel[triton.cdiv(width, tile.channels), parts](
        dh, z, u, dz, du, *pointers,
        tokens, width, tokens_per_part(tokens, parts, tile.tokens), spec.limit, spec.up_offset,
        z.stride(0), u.stride(0), low_rank.x_gate.stride(0) if low_rank else 0, dh.stride(0), dz.stride(0),
        **_options(tile, z, spec, low_rank),
    )  # fmt: skip


def _parts(tokens: int, width: int, tile: Tile) -> int:
    """Return a number of parts that fills a large GPU, at most one per tile."""
    return min(triton.cdiv(_PROGRAMS, triton.cdiv(width, tile.channels)), triton.cdiv(tokens, tile.tokens))


def _options(tile: Tile, z: Tensor, spec: GateSpec, low_rank: LowRank | None) -> dict[str, object]:
    """Return the compile-time arguments of both kernels."""
    rank = low_rank.b_gate.shape[1] if low_rank else 0
    # Tensor cores need at least 16 columns.
    sizes = {"RANK": rank, "R": max(16, triton.next_power_of_2(rank)), "EVEN": has_full_tiles(z, tile)}
    return {**sizes, **tile.options(z, spec.number, spec.limit)}
