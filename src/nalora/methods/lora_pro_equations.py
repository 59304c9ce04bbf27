"""LoRA-Pro's equations as pure tensor functions (Wang et al. 2024, arXiv 2407.18242).

Notation: W = W₀ + s·B·A with A of r × n and B of m × r. G is the gradient of W, so those of the factors are
g_A = s·Bᵀ·G and g_B = s·G·Aᵀ. P_B = B·(BᵀB)⁻¹·Bᵀ and P_A = Aᵀ·(AAᵀ)⁻¹·A are the projections on B's columns and A's
rows. A step along (g_A*, g_B*) moves W along s·B·g_A* + s·g_B*·A = P_B·G + (I − P_B)·G·P_A, the gradient closest to G
among all that steps of A and B can follow.

Tensors may have leading dimensions, for stacks of modules of one shape. The functions compute in the dtype of their
inputs and never branch on data; only `spectrum` waits for the device, because `torch.linalg.eigh` does.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Spectrum(NamedTuple):
    """A damped Gram matrix M + δ·I = V·diag(values)·Vᵀ and its inverse, both zero where M is."""

    values: Tensor
    vectors: Tensor
    inverse: Tensor


def default_damping(dtype: torch.dtype) -> float:
    """Return δ relative to the trace: eight times the machine epsilon, 1e-6 in float32.

    Measured in float32 at rank 8: the error of P_B·G + (I − P_B)·G·P_A is 5e-6 of G for a random B of any size from
    1e-6 to 1 (with an absolute δ of 1e-8 it is 1e-2 at B ~ 1e-4), and 1e-3 where one column of B depends on the others
    and the rounding of g_A is divided by δ. With one epsilon instead of eight these would be 7e-7 and 9e-3.
    """
    return 8 * torch.finfo(dtype).eps


def spectrum(gram: Tensor, damping: float | None = None) -> Spectrum:
    """Return eigenvalues, eigenvectors and inverse of M + δ·I with δ = damping · tr M; zeros for M = 0.

    A trace below tiny/eps² (8e-25 in float32: B ~ 1e-13) counts as zero. Above it everything stays finite, also the
    squares of g_A* that Adam keeps: ‖g_A*‖ ≤ ‖G‖ / (2·s·√δ) < 1e15·‖G‖.
    """
    info = torch.finfo(gram.dtype)
    relative = default_damping(gram.dtype) if damping is None else damping
    values, vectors = torch.linalg.eigh(gram)
    values = values.clamp_min(0)
    trace = values.sum(-1, keepdim=True)
    nonzero = trace > info.tiny / info.eps**2
    values = torch.where(nonzero, values + relative * trace, 0)
    reciprocal = torch.where(nonzero, values.reciprocal(), 0)
    return Spectrum(values, vectors, (vectors * reciprocal.unsqueeze(-2)) @ vectors.mT)


def coupling(of_b: Spectrum, of_a: Spectrum, right: Tensor) -> Tensor:
    """Return X of BᵀB·X + X·AAᵀ = R: in the eigenbases of the symmetric BᵀB and AAᵀ, X_ij = R_ij / (λ_i + μ_j)."""
    sums = of_b.values.unsqueeze(-1) + of_a.values.unsqueeze(-2)
    rotated = of_b.vectors.mT @ right @ of_a.vectors
    # Both are zero only where A = 0 and B = 0, and R is zero there as well.
    return of_b.vectors @ (rotated / sums.masked_fill(sums == 0, 1)) @ of_a.vectors.mT


def nearest_coupling(A: Tensor, g_A: Tensor, scaling: float, of_b: Spectrum, of_a: Spectrum) -> Tensor:
    """Return the X for which (g_A*, g_B*) is closest to (g_A, g_B).

    The derivative of ‖g_A* − g_A‖² + ‖g_B* − g_B‖² by X is zero where BᵀB·X + X·AAᵀ =
    −s⁻²·(BᵀB)⁻¹·g_A·Aᵀ + (g_A·Aᵀ − Bᵀ·g_B), and the bracket is zero: both are s·Bᵀ·G·Aᵀ.
    """
    return coupling(of_b, of_a, of_b.inverse @ (g_A @ A.mT) * -(scaling**-2))


def with_coupling(
    A: Tensor, B: Tensor, g_A: Tensor, g_B: Tensor, scaling: float, of_b: Spectrum, of_a: Spectrum, X: Tensor
) -> tuple[Tensor, Tensor]:
    """Return g_A* = s⁻²·(BᵀB)⁻¹·g_A + X·A and g_B* = s⁻²·(I − P_B)·g_B·(AAᵀ)⁻¹ − B·X, for any X."""
    outside = g_B - B @ (of_b.inverse @ (B.mT @ g_B))
    return (
        of_b.inverse @ g_A * scaling**-2 + X @ A,
        outside @ of_a.inverse * scaling**-2 - B @ X,
    )


def adjusted_gradients(
    A: Tensor,
    B: Tensor,
    g_A: Tensor,
    g_B: Tensor,
    scaling: float,
    of_b: Spectrum | None = None,
    of_a: Spectrum | None = None,
    damping: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (g_A*, g_B*) with the nearest X; B = 0 gives 0 and s⁻²·g_B·(AAᵀ)⁻¹.

    `of_b` and `of_a` are the spectra of BᵀB and AAᵀ, computed with `damping` where they are not given.
    """
    of_b = of_b or spectrum(B.mT @ B, damping)
    of_a = of_a or spectrum(A @ A.mT, damping)
    X = nearest_coupling(A, g_A, scaling, of_b, of_a)
    return with_coupling(A, B, g_A, g_B, scaling, of_b, of_a, X)


def equivalent_gradient(A: Tensor, B: Tensor, g_A: Tensor, g_B: Tensor, scaling: float) -> Tensor:
    """Return s·B·g_A* + s·g_B*·A, m × n: how W moves when A and B move along g_A* and g_B*."""
    return scaling * (B @ g_A + g_B @ A)


def gradients_of_factors(A: Tensor, B: Tensor, G: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """Return g_A = s·Bᵀ·G and g_B = s·G·Aᵀ."""
    return scaling * (B.mT @ G), scaling * (G @ A.mT)
