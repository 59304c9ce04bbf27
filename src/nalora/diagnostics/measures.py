"""How a block's gates change between two states, z → z′ on the same tokens, and the distribution of one state's gates.

Sums over tokens for each channel of [tokens, channels] inputs: float64 for measures and int64 for counts, so that they
do not depend on how tokens are batched. Elementwise operations use float32, or z's own dtype if that is wider.

D_EH and dead gates. χ = 1 + κ is relative to φ(z), so it grows without bound where φ vanishes: κ falls as −z² for GELU
and as z for SiLU. A permanently closed gate (GELU at z = −10: χ ≈ −100, φ ≈ −1e−22) then changes D_EH by more than
thousands of open ones, although its output is zero. So D_EH, the paper's measure, is reported together with D_EH_live:
the same sum with each gate weighted by its output, min(|φ(z)|, |φ(z′)|, 1). The weight is 0 for a gate that is dead
before or after and at most 1; so D_EH_live ≤ D_EH, with equality where all gates have an output of 1 or more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from nalora.activations import Activation
from nalora.equations import chi, homogeneity_movement, regime_counts

Thresholds = tuple[float, float] | None

# Nearly all gates of language models are in this range; values beyond it are counted in the outermost bins.
HISTOGRAM_EDGES = tuple(i / 4 for i in range(-32, 33))

# The measures of an interval, in the order of files and tables.
MEASURES = ("D_sel", "flip", "kappa_drift", "suppressive", "positive", "severe", "D_EH", "D_EH_live")
# Sums over channels, weighted by the mask; the other measures are means over channels.
MASKED = ("D_EH", "D_EH_live")

Sums = TypeVar("Sums", bound="TokenSums")


@dataclass(frozen=True)
class TokenSums:
    """Sums over tokens by name, each with an entry per channel or bin."""

    tokens: int
    sums: dict[str, Tensor]

    def __add__(self: Sums, other: Sums) -> Sums:
        return type(self)(self.tokens + other.tokens, {name: self.sums[name] + other.sums[name] for name in self.sums})


class Movement(TokenSums):
    """Sums of `MEASURES` per channel. The counts of regimes are missing for an activation without regimes.

    D_sel: Σ |s(z′) − s(z)|. kappa_drift: Σ |κ(z′) − κ(z)|. D_EH: Σ (χ(z′) − χ(z))². D_EH_live: the same, weighted by
    min(|φ(z)|, |φ(z′)|, 1). flip: changes of the regime. suppressive, positive: crossings of the lower and of the upper
    threshold. severe: jumps between the outer regimes, which cross both: flip = suppressive + positive − severe.
    """

    def per_channel(self) -> dict[str, Tensor]:
        """Return the means over tokens by measure, [channels], without the mask's weight."""
        return {name: self.sums[name].double() / self.tokens for name in MEASURES if name in self.sums}

    def means(self, mask: Tensor | None = None) -> dict[str, float | None]:
        """Return the means over tokens and channels; D_EH and D_EH_live are sums over channels with weights `mask`."""
        result: dict[str, float | None] = dict.fromkeys(MEASURES)
        for name, value in self.per_channel().items():
            if name in MASKED:
                result[name] = float((value if mask is None else value * mask.to(value)).sum())
            else:
                result[name] = float(value.mean())
        return result


def movement(before: Tensor, after: Tensor, activation: Activation, thresholds: Thresholds) -> Movement:
    """Return how the gates changed from z = `before` to z′ = `after`, both [tokens, channels]."""
    z, moved = _wide(before), _wide(after)
    kappa, kappa_moved = activation.kappa(z), activation.kappa(moved)
    change = homogeneity_movement(chi(kappa), chi(kappa_moved), 1.0, reduction="none")
    weight = torch.minimum(activation.phi(z).abs(), activation.phi(moved).abs()).clamp(max=1)
    sums = {
        "D_sel": _summed((activation.selection(moved) - activation.selection(z)).abs()),
        "kappa_drift": _summed((kappa_moved - kappa).abs()),
        "D_EH": _summed(change),
        # Avoids 0 · ∞ where χ overflows.
        "D_EH_live": _summed(torch.where(weight == 0, weight, weight * change)),
    }
    if thresholds is not None:
        lower, upper = thresholds
        below = (z < lower) ^ (moved < lower)
        above = (z > upper) ^ (moved > upper)
        counts = {"flip": below | above, "suppressive": below, "positive": above, "severe": below & above}
        sums |= {name: changed.sum(0) for name, changed in counts.items()}
    return Movement(z.shape[0], sums)


class Distribution(TokenSums):
    """One state's gates: regime counts [3, channels] (suppressive, responsive, positive) and a histogram of z.

    The regimes are missing for an activation without them, the histogram unless it was requested.
    """

    def shares(self) -> tuple[float, float, float] | None:
        """Return (p_sup, p_res, p_pos) over tokens and channels (eq:regime_probs)."""
        regimes = self.sums.get("regimes")
        if regimes is None:
            return None
        suppressive, responsive, positive = (regimes.sum(1).double() / regimes.sum()).tolist()
        return suppressive, responsive, positive


def distribution(z: Tensor, thresholds: Thresholds, *, histogram: bool = False) -> Distribution:
    """Return the distribution of the gates z, [tokens, channels]."""
    z = _wide(z)
    sums = {} if thresholds is None else {"regimes": regime_counts(z, *thresholds, dim=0)}
    if histogram:
        first, last, bins = HISTOGRAM_EDGES[0], HISTOGRAM_EDGES[-1], len(HISTOGRAM_EDGES) - 1
        numbers = z[~z.isnan()]
        places = ((numbers - first) * (bins / (last - first))).floor_().clamp_(0, bins - 1)
        sums["histogram"] = torch.bincount(places.int(), minlength=bins)
    return Distribution(z.shape[0], sums)


def token_slices(tensors: Sequence[Tensor], mask: Tensor | None, elements: int) -> Iterator[list[Tensor]]:
    """Yield the real tokens of tensors of one shape [..., channels] as [tokens, channels] slices.

    A slice has at most `elements` numbers per tensor, because what is computed from it is several times its size.
    """
    width, device = tensors[0].shape[-1], tensors[0].device
    flat = [tensor.reshape(-1, width) for tensor in tensors]
    real = torch.ones(len(flat[0]), dtype=torch.bool, device=device) if mask is None else mask.reshape(-1).to(device)
    for part in torch.split(real.nonzero()[:, 0], max(1, elements // width)):
        yield [tensor.index_select(0, part) for tensor in flat]


def _wide(z: Tensor) -> Tensor:
    return z.to(torch.promote_types(z.dtype, torch.float32))


def _summed(values: Tensor) -> Tensor:
    if values.device.type == "mps":  # has no float64
        values = values.cpu()
    return values.sum(0, dtype=torch.float64)
