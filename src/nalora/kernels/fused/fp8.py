"""Matrix products in FP8 (e4m3) of a frozen weight: forward, and backward for the input.

A weight is kept once, as e4m3 codes [out, in] with one float32 scale per output row. Activations and gradients are
quantised for each product, with one scale per token. Forward contracts over the inputs, along which the codes are
contiguous, as Hopper's FP8 products need. Backward contracts over the outputs: there the weight's scales are
multiplied into dy before dy is quantised, and the codes are transposed into a temporary buffer, so that no second copy
of the weight is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

CODES = torch.float8_e4m3fn
LARGEST = 448.0  # the largest finite number of e4m3
# 2⁻¹⁰⁰: below it the inverse of a scale would overflow, and numbers that small are rounded to zero.
SMALLEST = 7.888609052210118e-31
_TRANSPOSED_TILE = 64


class Quantised(NamedTuple):
    """A matrix [rows, columns] as e4m3 codes, and the float32 scale of each row, [rows, 1]."""

    codes: Tensor
    scales: Tensor

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """Return the matrix in the given dtype."""
        return (self.codes.to(torch.float32) * self.scales).to(dtype)


def quantise_rows(x: Tensor, column_scales: Tensor | None = None) -> Quantised:
    """Quantise each row of x, after multiplying its columns by `column_scales`, if given.

    A row's largest magnitude is mapped to 448, or a tiny one to less. A row of zeros has the scale 1, and a number that
    is not finite makes its row not finite, so that a training that diverges is noticed.
    """
    if x.is_cuda:
        return quantise_rows_by_triton(x, column_scales)
    values = x.to(torch.float32)
    if column_scales is not None:
        values = values * column_scales
    largest = values.abs().amax(dim=1, keepdim=True)
    largest = torch.where(largest == 0, LARGEST, largest.clamp(min=SMALLEST))
    return Quantised((values * (LARGEST / largest)).to(CODES), largest / LARGEST)


@triton.jit
def _quantise_kernel(
    x_ptr, column_scales_ptr, codes_ptr, scales_ptr, columns, x_stride,
    SCALED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Quantise one row: it is read once and stays in registers."""
    row = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, BLOCK)
    inside = j < columns
    values = tl.load(x_ptr + row * x_stride + j, mask=inside, other=0.0).to(tl.float32)
    if SCALED:
        values *= tl.load(column_scales_ptr + j, mask=inside, other=0.0)
    largest = tl.max(tl.abs(values), axis=0)
    largest = tl.where(largest == 0.0, 448.0, tl.where(largest < 7.888609052210118e-31, 7.888609052210118e-31, largest))
    codes = (values * (448.0 / largest)).to(tl.float8e4nv)
    tl.store(codes_ptr + row * columns + j, codes, mask=inside)
    tl.store(scales_ptr + row, largest / 448.0)


def quantise_rows_by_triton(x: Tensor, column_scales: Tensor | None = None) -> Quantised:
    """Return what `quantise_rows` returns, in one pass over x."""
    rows, columns = x.shape
    if x.stride(1) != 1:  # an expanded or transposed gradient
        x = x.contiguous()
    codes = torch.empty(rows, columns, dtype=CODES, device=x.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(columns)
    # At most 32 numbers per thread.
    warps = min(16, max(1, block // 1024))
    _quantise_kernel[(rows,)](
        x, column_scales, codes, scales, columns, x.stride(0),
        SCALED=column_scales is not None, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return Quantised(codes, scales)


@triton.jit
def _transpose_kernel(source_ptr, target_ptr, rows, columns, target_stride, TILE: tl.constexpr):
    """Write a tile of the source [rows, columns] to the transposed place."""
    i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    j = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = (i < rows)[:, None] & (j < columns)[None, :]
    tile = tl.load(source_ptr + i[:, None] * columns + j[None, :], mask=inside, other=0)
    tl.store(target_ptr + j[:, None] * target_stride + i[None, :], tl.trans(tile), mask=tl.trans(inside))


def transpose_into(target: Tensor, codes: Tensor) -> None:
    """Write the transpose of codes [rows, columns] into target [columns, rows], whose rows may be strided."""
    if not codes.is_cuda:
        target.view(torch.uint8).copy_(codes.view(torch.uint8).T)
        return
    transpose_by_triton(target, codes)


def transpose_by_triton(target: Tensor, codes: Tensor) -> None:
    """Do what `transpose_into` does, in tiles."""
    rows, columns = codes.shape
    grid = triton.cdiv(rows, _TRANSPOSED_TILE), triton.cdiv(columns, _TRANSPOSED_TILE)
    _transpose_kernel[grid](
        codes.view(torch.uint8), target.view(torch.uint8), rows, columns, target.stride(0),
        TILE=_TRANSPOSED_TILE, num_warps=4,
    )  # fmt: skip


def product(x: Quantised, weight: Quantised, dtype: torch.dtype) -> Tensor:
    """Return x · weightᵀ for a weight [out, in].

    Sums are accumulated in the tensor cores' 22 bits, which takes 5 % less time; those of gradients are not.
    """
    return _scaled_product(x, weight.codes.T, weight.scales.T, dtype, fast=True)


def input_gradient(weights: Sequence[Quantised], grads: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return Σ gradᵢ · weightᵢ for weights [outᵢ, in], as one product over all outputs.

    `grads` may be slices of one matrix, side by side, which is then quantised without a copy.
    """
    scales = torch.cat([weight.scales.view(-1) for weight in weights])
    dy = quantise_rows(_side_by_side(grads), scales)
    columns = weights[0].codes.shape[1]
    transposed = torch.empty(columns, scales.numel(), dtype=CODES, device=dy.codes.device)
    pieces = transposed.split([weight.codes.shape[0] for weight in weights], dim=1)
    for piece, weight in zip(pieces, weights, strict=True):
        transpose_into(piece, weight.codes)
    ones = torch.ones(1, columns, dtype=torch.float32, device=dy.codes.device)
    return _scaled_product(dy, transposed.T, ones, dtype, fast=False)


def _scaled_product(x: Quantised, right: Tensor, right_scales: Tensor, dtype: torch.dtype, *, fast: bool) -> Tensor:
    # The products of a GPU with one scale per row write bf16 alone.
    out = torch.bfloat16 if x.codes.is_cuda else dtype
    scales = {"scale_a": x.scales, "scale_b": right_scales}
    return torch._scaled_mm(x.codes, right, **scales, out_dtype=out, use_fast_accum=fast).to(dtype)


def _side_by_side(grads: Sequence[Tensor]) -> Tensor:
    """Return the matrices as one, without a copy if they are neighbouring columns of one matrix."""
    first = grads[0]
    if len(grads) == 1:
        return first
    offset = first.storage_offset()
    for grad in grads:
        same = grad.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() and grad.dtype == first.dtype
        if not same or grad.stride() != first.stride() or grad.storage_offset() != offset:
            return torch.cat(list(grads), dim=1)
        offset += grad.shape[1]
    return first.as_strided((first.shape[0], offset - first.storage_offset()), first.stride())
