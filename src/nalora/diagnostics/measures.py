"""What changed at a block's gates between two states, z → z′ on the same tokens, and how one state's gates stand.

Sums over tokens for each channel, [tokens, channels] in: float64 for measures, int64 for counts, so that they do not
depend on how tokens were batched. Elementwise work is done in float32 (in z's own dtype if that is wider).

D_EH and dead gates. χ = 1 + κ is relative to φ(z), so it grows without bound where φ vanishes: κ falls as −z² for GELU
and as z for SiLU. A gate that is closed for good (GELU at z = −10: χ ≈ −100, φ ≈ −1e−22) then moves D_EH by more than
thousands of open ones, although nothing of it reaches the output. So D_EH, the paper's measure, is reported with
D_EH_live: the same sum in which every gate counts by its output, with the weight min(|φ(z)|, |φ(z′)|, 1). The weight is
0 for a gate that is dead before or after and at most 1 however large the output; so D_EH_live ≤ D_EH, with equality
where all gates have an output of 1 or more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from nalora.activations import Activation
from nalora.equations import chi, homogeneity_movement, regime_counts

Thresholds = tuple[float, float] | None

# The gates of language models lie within these, nearly all; what lies beyond is counted in the outermost bins.
HISTOGRAM_EDGES = tuple(i / 4 for i in range(-32, 33))

# The measures of an interval in the order of files and tables; those of `NEED_REGIMES` are missing without regimes.
MEASURES = ("D_sel", "flip", "kappa_drift", "suppressive", "positive", "severe", "D_EH", "D_EH_live")
# Sums over channels, weighted by the mask; the others are means over them.
MASKED = ("D_EH", "D_EH_live")
NEED_REGIMES = ("flip", "suppressive", "positive", "severe")


@dataclass(frozen=True)
class Movement:
    """Sums over `tokens`, one entry a channel; the counts are None for an activation without regimes.

    Attributes:
        selection: Σ |s(z′) − s(z)|, raw gate movement.
        kappa: Σ |κ(z′) − κ(z)|.
        homogeneity: Σ (χ(z′) − χ(z))².
        live_homogeneity: Σ min(|φ(z)|, |φ(z′)|, 1) · (χ(z′) − χ(z))².
        flip: how often the regime changed.
        suppressive: crossings of the lower threshold.
        positive: crossings of the upper threshold.
        severe: jumps from one outer regime to the other, which cross both: flip = suppressive + positive − severe.
    """

    tokens: int
    selection: Tensor
    kappa: Tensor
    homogeneity: Tensor
    live_homogeneity: Tensor
    flip: Tensor | None
    suppressive: Tensor | None
    positive: Tensor | None
    severe: Tensor | None

    def __add__(self, other: Movement) -> Movement:
        return Movement(**{each.name: _added(self, other, each.name) for each in fields(self)})

    def per_channel(self) -> dict[str, Tensor | None]:
        """The means over tokens by measure, [channels]; D_EH and D_EH_live without the mask's weight."""
        sums = {
            "D_sel": self.selection, "flip": self.flip, "kappa_drift": self.kappa, "suppressive": self.suppressive,
            "positive": self.positive, "severe": self.severe, "D_EH": self.homogeneity,
            "D_EH_live": self.live_homogeneity,
        }  # fmt: skip
        return {name: None if value is None else value.double() / self.tokens for name, value in sums.items()}

    def means(self, mask: Tensor | None = None) -> dict[str, float | None]:
        """The means over tokens and channels; D_EH is the mean over tokens of Σ_c m_c (χ′ − χ)², m = 1 without mask.

        D_EH_live is the same with the weight of `live_homogeneity` in the sum.
        """
        result: dict[str, float | None] = {}
        for name, value in self.per_channel().items():
            if name in MASKED:
                assert value is not None
                result[name] = float((value if mask is None else value * mask.to(value)).sum())
            else:
                result[name] = None if value is None else float(value.mean())
        return result


def movement(before: Tensor, after: Tensor, activation: Activation, thresholds: Thresholds) -> Movement:
    """How the gates moved from z = `before` to z′ = `after`, both [tokens, channels]."""
    z, moved = _wide(before), _wide(after)
    kappa, kappa_moved = activation.kappa(z), activation.kappa(moved)
    change = homogeneity_movement(chi(kappa), chi(kappa_moved), 1.0, reduction="none")
    open_by = torch.minimum(activation.phi(z).abs(), activation.phi(moved).abs()).clamp(max=1)
    counts: dict[str, Tensor | None] = dict.fromkeys(NEED_REGIMES)
    if thresholds is not None:
        lower, upper = thresholds
        below = (z < lower) ^ (moved < lower)
        above = (z > upper) ^ (moved > upper)
        flip = {"flip": below | above, "suppressive": below, "positive": above, "severe": below & above}
        counts |= {name: each.sum(0) for name, each in flip.items()}
    return Movement(
        tokens=z.shape[0],
        selection=_summed((activation.selection(moved) - activation.selection(z)).abs()),
        kappa=_summed((kappa_moved - kappa).abs()),
        homogeneity=_summed(change),
        # Not 0 · ∞ where χ is beyond the numbers.
        live_homogeneity=_summed(torch.where(open_by == 0, open_by, open_by * change)),
        **counts,
    )


@dataclass(frozen=True)
class Standing:
    """How one state's gates stand: regime counts [3, channels] (suppressive, responsive, positive), and how many z lie
    in each bin of `HISTOGRAM_EDGES`; each is None where it was not asked for or there are no regimes.
    """

    tokens: int
    regimes: Tensor | None
    histogram: Tensor | None

    def __add__(self, other: Standing) -> Standing:
        return Standing(**{each.name: _added(self, other, each.name) for each in fields(self)})

    def shares(self) -> tuple[float, float, float] | None:
        """(p_sup, p_res, p_pos) over tokens and channels (eq:regime_probs)."""
        if self.regimes is None:
            return None
        suppressive, responsive, positive = (self.regimes.sum(1).double() / self.regimes.sum()).tolist()
        return suppressive, responsive, positive


def standing(z: Tensor, thresholds: Thresholds, *, histogram: bool = False) -> Standing:
    """Where the gates z, [tokens, channels], stand."""
    z = _wide(z)
    regimes = None if thresholds is None else regime_counts(z, *thresholds, dim=0)
    return Standing(z.shape[0], regimes, _histogram(z) if histogram else None)


def real_rows(z: Tensor, mask: Tensor | None, limit: int = 1 << 20) -> Iterator[Tensor]:
    """Which rows of z, flattened to [tokens, channels], are real tokens, in parts of at most `limit` numbers.

    Parts, because what is computed from z is several times its size: 2²⁰ float32 numbers are 4 MiB.
    """
    tokens = z.shape[:-1].numel()
    rows = torch.arange(tokens, device=z.device) if mask is None else mask.reshape(-1).nonzero()[:, 0]
    yield from torch.split(rows, max(1, limit // z.shape[-1]))


def rows_of(z: Tensor, rows: Tensor) -> Tensor:
    """Those rows of z, [rows, channels]."""
    return z.reshape(-1, z.shape[-1]).index_select(0, rows)


def _wide(z: Tensor) -> Tensor:
    return z.to(torch.promote_types(z.dtype, torch.float32))


def _summed(values: Tensor) -> Tensor:
    if values.device.type == "mps":  # it has no float64
        values = values.cpu()
    return values.sum(0, dtype=torch.float64)


def _histogram(z: Tensor) -> Tensor:
    first, last, bins = HISTOGRAM_EDGES[0], HISTOGRAM_EDGES[-1], len(HISTOGRAM_EDGES) - 1
    finite = z[~z.isnan()]
    places = ((finite - first) * (bins / (last - first))).floor_().clamp_(0, bins - 1)
    return torch.bincount(places.int(), minlength=bins)


def _added(one: object, other: object, name: str) -> Any:
    a, b = getattr(one, name), getattr(other, name)
    return None if a is None or b is None else a + b
