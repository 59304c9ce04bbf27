"""The paper's equations as pure tensor functions, named by their LaTeX labels.

Notation: z is the gate pre-activation, u the feature view, φ the activation, s its selection weight.
Channels are the last dimension; everything before it is tokens or blocks. The functions work in the dtype
of their inputs, never branch on data and never wait for the device, so a NaN in the input is a NaN in the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Elementwise = Callable[[Tensor], Tensor]


# Section 3: selection and its mismatch


def selection_weight(z: Tensor, phi: Tensor, derivative: Tensor) -> Tensor:
    """Return s(z) = φ(z)/z from the values φ(z) and φ′(z); at z = 0 its limit φ′(0) (eq:selection_weight_def)."""
    zero = z == 0
    # The inner fill avoids 0/0 in the backward pass, which the outer `where` cannot mask.
    return torch.where(zero, derivative, phi / z.masked_fill(zero, 1))


def channel_utility(phi: Tensor, u: Tensor) -> Tensor:
    """Return U(z, u) = φ(z) ⊙ u, a channel's input to the down projection (eq:utility_def)."""
    return phi * u


class Mismatch(NamedTuple):
    """The three terms of eq:exact_selection_decomp."""

    residual_through_view: Tensor
    selection_mismatch: Tensor
    view_mismatch: Tensor

    @property
    def total(self) -> Tensor:
        """U(z_tar, u_tar) − U(z_lora, u_lora)."""
        return self.residual_through_view + self.selection_mismatch + self.view_mismatch


def mismatch_decomposition(
    z_target: Tensor,
    u_target: Tensor,
    z_lora: Tensor,
    u_lora: Tensor,
    *,
    phi: Elementwise,
    selection: Elementwise,
) -> Mismatch:
    """Decompose the difference between the utilities of a target and of a LoRA state (eq:exact_selection_decomp).

    Exact for every self-gated φ(z) = s(z)·z: s(z_tar)·Δz·u_lora is the residual through the current view,
    (s(z_tar) − s(z_lora))·z_lora·u_lora the selection mismatch, φ(z_tar)·Δu the view mismatch.
    """
    weight = selection(z_target)
    return Mismatch(
        residual_through_view=weight * (z_target - z_lora) * u_lora,
        selection_mismatch=(weight - selection(z_lora)) * z_lora * u_lora,
        view_mismatch=phi(z_target) * (u_target - u_lora),
    )


def mismatch_bound(
    z_target: Tensor,
    u_target: Tensor,
    z_lora: Tensor,
    u_lora: Tensor,
    *,
    phi: Elementwise,
    selection: Elementwise,
    p: float = 2.0,
    dim: int = -1,
) -> Tensor:
    """Return an upper bound on the ℓ_p norm of the utility mismatch (eq:selection_amplification_bound)."""

    def norm(x: Tensor, order: float = p) -> Tensor:
        size: Tensor = torch.linalg.vector_norm(x, order, dim=dim)
        return size

    def largest(x: Tensor) -> Tensor:
        return norm(x, math.inf)

    weight = selection(z_target)
    through_view = largest(weight) * norm(z_target - z_lora)
    through_selection = largest(z_lora) * norm(weight - selection(z_lora))
    through_features = largest(phi(z_target)) * norm(u_target - u_lora)
    return largest(u_lora) * (through_view + through_selection) + through_features


# Section 3: gate sensitivity and effective homogeneity


def gate_sensitivity(derivative: Tensor) -> Tensor:
    """Return k(z) = |φ′(z)|, the factor of the gate's gradient that depends on the gate alone (eq:keff_elem)."""
    return derivative.abs()


def kappa(z: Tensor, phi: Tensor, derivative: Tensor, epsilon: float = 0.0) -> Tensor:
    """Return κ(z) = zφ′(z) / (φ(z) + ε) as in eq:kappa_def_main.

    0/0 at z = 0 without ε, and with ε a pole wherever φ(z) = −ε: for SiLU and 10⁻⁶ at z ≈ −2·10⁻⁶ and
    −16.6. The closed forms of `nalora.activations` have neither.
    """
    return z * derivative / (phi + epsilon)


def chi(kappa: Tensor) -> Tensor:
    """Return χ = 1 + κ, the log-log slope of |φ(z)u| along x ↦ αx (eq:kappa_def_main, prop:local_scaling_main)."""
    return 1 + kappa


def homogeneity_movement(
    chi_before: Tensor, chi_after: Tensor, weight: Tensor | float, *, reduction: Literal["mean", "none"] = "mean"
) -> Tensor:
    """Return D_EH = E_x Σ_c ω_c (χ′_c − χ_c)² between two states, a scalar (eq:eh_consistency).

    All dimensions before the channels are tokens; `weight` is [channels] or [..., channels]. The reduction ``"none"``
    returns the term of every token and channel.
    """
    terms = weight * (chi_after - chi_before).square()
    return terms.sum(-1).mean() if reduction == "mean" else terms


# Section 4.1: the temporal-importance channel mask


def channel_score(sensitivity_sum: Tensor, tokens: Tensor) -> Tensor:
    """Return k_eff = E|φ′(z)| of each channel (eq:kout_channel), which is not finite without tokens.

    Args:
        sensitivity_sum: Σ over tokens of k(z), [..., channels].
        tokens: the number of tokens, [...].
    """
    return sensitivity_sum / tokens.unsqueeze(-1)


def quantile_threshold(k_eff: Tensor, keep_ratio: float) -> Tensor:
    """Return τ_k = Quantile(k_eff, 1 − keep_ratio) over the channels, with keepdim (before eq:mask_soft).

    For finite scores the result is that of `torch.quantile` with linear interpolation, which does not support bfloat16
    or more than 16M elements.
    """
    ordered = k_eff.sort(dim=-1).values
    last = ordered.shape[-1] - 1
    position = (1 - keep_ratio) * last
    below = math.floor(position)
    above = min(below + 1, last)
    return torch.lerp(ordered[..., below, None], ordered[..., above, None], position - below)


def soft_mask(k_eff: Tensor, threshold: Tensor, sharpness: float) -> Tensor:
    """Return m_new = σ(β(k_eff − τ_k)), the soft top-k (eq:mask_soft)."""
    return torch.sigmoid(sharpness * (k_eff - threshold))


def ema(previous: Tensor, new: Tensor, decay: float) -> Tensor:
    """Return decay·previous + (1 − decay)·new (eq:mask_ema for the mask, eq:scale_ema for the step scales)."""
    # As an interpolation, a constant value stays the same to the last bit.
    return torch.lerp(new, previous, decay)


# Section 4.2: homogeneity-dynamics step scaling


def regime_counts(z: Tensor, lower: float, upper: float, dim: int | None = None) -> Tensor:
    """Count the suppressive, responsive and positive z of eq:regime_probs, int64 [3, ...].

    The count is over all z or one dimension. Both thresholds belong to the responsive regime and are rounded to z's
    dtype; a NaN is in no regime.
    """
    regimes = (z < lower, (z >= lower) & (z <= upper), z > upper)
    return torch.stack([regime.sum(dim) for regime in regimes])


def regime_shares(counts: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return (p_sup, p_res, p_pos) from the counts [..., 3] (eq:regime_probs)."""
    return counts.to(dtype) / counts.sum(-1, keepdim=True).to(dtype)


def regime_score(shares: Tensor, positive_penalty: float) -> Tensor:
    """Return a = clamp(p_res − λ_pos·p_pos, 0, 1) from the shares [..., 3] (eq:regime_score)."""
    _, responsive, positive = shares.unbind(-1)
    return (responsive - positive_penalty * positive).clamp(0, 1)


def step_scale(a: Tensor, sensitivity: float | Tensor, low: float | Tensor, high: float | Tensor) -> Tensor:
    """Return s_new = clip(1 + α(2a − 1), s_min, s_max) of one or, by broadcasting, more projections (eq:step_scale)."""
    return torch.clamp(1 + sensitivity * (2 * a - 1), low, high)  # type: ignore[arg-type]
