"""Results from the mismatch's sums: energies, shares, the bound, the top channels and which statistic predicts them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nalora.diagnostics.decomposition import TERMS, MismatchSums
from nalora.errors import counted
from nalora.evaluation.significance import scipy_stats

# The share of the channels that the paper's mask keeps.
TOP_SHARE = 0.3
# Alternatives to the mask, computed from the run's z and u on the probe: attributes of `MismatchSums`.
STATISTICS = {"derivative": "E|φ′|", "utility": "E|φ′u|", "selection": "E|s′zu|"}
_LISTED_CHANNELS = 10
_PAIRS = {"residual_selection": (0, 1), "residual_view": (0, 2), "selection_view": (1, 2)}
# Upper limits of the rank correlation for each description.
_VERDICTS = (
    (-0.1, "puts its weight away from the mismatch"),
    (0.1, "is unrelated to the mismatch"),
    (0.3, "agrees weakly with the mismatch"),
    (0.6, "puts much of its weight where the mismatch is"),
    (math.inf, "puts its weight where the mismatch is"),
)


def measures(sums: Sequence[MismatchSums], masks: Sequence[Tensor | None] | None = None) -> dict[str, Any]:
    """Return the contents of `mismatch.json`: lists with an entry per block, None for undefined values.

    `masks` are the run's final masks, None for a block without one; None for a run without masks.
    """

    def means(values: Iterable[Tensor]) -> list[float | None]:
        pairs = zip(values, sums, strict=True)
        return _finite(value.item() / max(1, block.tokens) for value, block in pairs)

    energies = [(block.products.diagonal() / max(1, block.tokens)).tolist() for block in sums]
    by_term = dict(zip(TERMS, zip(*energies, strict=True), strict=True)) if energies else dict.fromkeys(TERMS, ())
    return {
        "energy": {
            **{term: _finite(values) for term, values in by_term.items()},
            "total": means(block.total for block in sums),
        },
        # Energies do not add up: total = Σ energies + 2 Σ cross.
        "cross": {pair: means(block.products[at] for block in sums) for pair, at in _PAIRS.items()},
        "share": {
            term: _finite(_ratio(value, sum(energy)) for value, energy in zip(values, energies, strict=True))
            for term, values in by_term.items()
        },
        "bound": {
            "actual": means(block.actual for block in sums),
            "bound": means(block.bound for block in sums),
            "tightness": _finite(_ratio(block.actual.item(), block.bound.item()) for block in sums),
        },
        "top_channels": [_top_channels(block.channel_energy) for block in sums],
        # What the best 30 % of the channels hold: the maximum of `energy_held` below.
        "most_held": [held_by_top(block.channel_energy, block.channel_energy, TOP_SHARE) for block in sums],
        "mask": None if masks is None else agreement(masks, sums),
        "statistics": {name: agreement([getattr(block, name) for block in sums], sums) for name in STATISTICS},
    }


def agreement(weights: Sequence[Tensor | None], sums: Sequence[MismatchSums]) -> dict[str, Any]:
    """Return how well weights of channels agree with their selection mismatch; None where either is constant."""
    pairs = [
        None if weight is None else (weight.detach().cpu().double(), block.channel_energy.cpu())
        for weight, block in zip(weights, sums, strict=True)
    ]
    return {
        "rank_correlation": [pair and rank_correlation(*pair) for pair in pairs],
        "top_share": TOP_SHARE,
        "top_overlap": [pair and top_overlap(*pair, TOP_SHARE) for pair in pairs],
        "energy_held": [pair and held_by_top(*pair, TOP_SHARE) for pair in pairs],
        "chance": TOP_SHARE,
    }


def in_words(result: Mapping[str, Any]) -> str:
    """Return a sentence on whether the mask, or without one the sensitivity, agrees with the mismatch."""
    if not any(result["energy"]["total"]):
        return "The run and its target have the same values in every block: there is no mismatch."
    weights = result["mask"] or result["statistics"]["derivative"]
    name = "mask" if result["mask"] else "sensitivity E|φ′(z)|, which would be the mask,"
    correlations = [value for value in weights["rank_correlation"] if value is not None]
    if not correlations:
        return f"The {name} gives every channel the same weight."
    correlation, held = _mean(correlations), _mean(weights["energy_held"])
    verdict = next(words for limit, words in _VERDICTS if correlation < limit)
    return (
        f"The {name} {verdict}: rank correlation {correlation:+.2f} over {counted(len(correlations), 'block')}; its top"
        f" {TOP_SHARE:.0%} of the channels hold {held:.0%} of the selection mismatch"
        f" (chance {TOP_SHARE:.0%}, at most {_mean(result['most_held']):.0%})."
    )


def rank_correlation(one: Tensor, other: Tensor) -> float | None:
    """Return Spearman's ρ, with mean ranks for ties; None where either side is constant or not finite."""
    if not _have_order(one, other):
        return None
    return float(scipy_stats().spearmanr(one.double().cpu(), other.double().cpu()).statistic)


def top_overlap(one: Tensor, other: Tensor, share: float) -> float | None:
    """Return how much of one's top `share` is in the other's too; `share` by chance, None where either is constant."""
    if not _have_order(one, other):
        return None
    return float(_top_weights(one, share) @ _top_weights(other, share)) / _top_count(one, share)


def held_by_top(values: Tensor, amounts: Tensor, share: float) -> float | None:
    """Return the part of all `amounts` in the top `share` of the channels by `values`; `share` by chance."""
    total = float(amounts.double().sum())
    if not total or not _have_order(values, amounts):
        return None
    return float(_top_weights(values, share) @ amounts.double()) / total


def _top_weights(values: Tensor, share: float) -> Tensor:
    """Return how much each channel belongs to the top `share`; channels that tie for the last places share them."""
    count = _top_count(values, share)
    threshold = values.sort(descending=True).values[count - 1]
    above, tied = values > threshold, values == threshold
    return above.double() + tied.double() * ((count - above.sum()) / tied.sum())


def _top_count(values: Tensor, share: float) -> int:
    return max(1, round(share * len(values)))


def _have_order(*sides: Tensor) -> bool:
    return all(bool(torch.isfinite(side).all()) and bool(side.min() < side.max()) for side in sides)


def _top_channels(energy: Tensor) -> list[list[float]]:
    """Return the channels with the most energy and their shares of it; none where nothing differs."""
    total = energy.sum().item()
    if not total or not math.isfinite(total):
        return []
    top = energy.topk(min(_LISTED_CHANNELS, len(energy)))
    return [[c, e / total] for c, e in zip(top.indices.tolist(), top.values.tolist(), strict=True)]


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _finite(values: Iterable[float | None]) -> list[float | None]:
    """Return the values with None in place of those that are not finite, which JSON does not have."""
    return [value if value is not None and math.isfinite(value) else None for value in values]


def _mean(values: Iterable[float | None]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else math.nan
