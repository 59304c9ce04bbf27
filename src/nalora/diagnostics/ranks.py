"""Whether one number per channel orders the channels as another does."""

from __future__ import annotations

import torch
from torch import Tensor

from nalora.evaluation.significance import scipy_stats


def rank_correlation(one: Tensor, other: Tensor) -> float | None:
    """Spearman's ρ, with mean ranks for ties. None where either side has no order at all."""
    if not _ordered(one, other):
        return None
    return float(scipy_stats().spearmanr(one.double().cpu(), other.double().cpu()).statistic)


def top_weights(values: Tensor, share: float) -> Tensor:
    """How much each channel belongs to the top `share` of them, float64, summing to the number of places.

    Channels that tie for the last places share them equally, so that the answer does not hang on their order.
    """
    places = _places(values, share)
    threshold = values.sort(descending=True).values[places - 1]
    above, tied = values > threshold, values == threshold
    left = places - above.sum()
    return above.double() + tied.double() * (left / tied.sum())


def top_overlap(one: Tensor, other: Tensor, share: float) -> float | None:
    """How much of one's top `share` is in the other's too; `share` by chance. None where either has no order."""
    if not _ordered(one, other):
        return None
    return float(top_weights(one, share) @ top_weights(other, share)) / _places(one, share)


def held_by_top(values: Tensor, amounts: Tensor, share: float) -> float | None:
    """The part of all `amounts` that the top `share` of the channels by `values` hold; `share` by chance."""
    total = float(amounts.double().sum())
    if not total or not _ordered(values, amounts):
        return None
    return float(top_weights(values, share) @ amounts.double()) / total


def _places(values: Tensor, share: float) -> int:
    return max(1, round(share * len(values)))


def _ordered(*sides: Tensor) -> bool:
    return all(bool(torch.isfinite(side).all()) and bool(side.min() < side.max()) for side in sides)
