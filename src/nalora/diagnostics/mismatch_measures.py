"""What the mismatch's sums say: energies, shares, the bound, the channels that carry it and who pointed at them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from nalora.diagnostics.decomposition import TERMS, MismatchSums
from nalora.diagnostics.ranks import held_by_top, rank_correlation, top_overlap
from nalora.errors import counted

# The paper keeps 30 % of the channels, so that is how much of the mismatch's order a mask could hit.
TOP_SHARE = 0.3
# What could have been the mask, taken from the run's own z and u on the probe: attributes of `MismatchSums`.
STATISTICS = {"derivative": "E|φ′|", "utility": "E|φ′u|", "selection": "E|s′zu|"}
_LISTED_CHANNELS = 10
_PAIRS = {"residual_selection": (0, 1), "residual_view": (0, 2), "selection_view": (1, 2)}


def measures(sums: Sequence[MismatchSums], masks: Sequence[Tensor | None] | None = None) -> dict[str, Any]:
    """Lists with an entry for each block, as `mismatch.json` holds them; None where a number has no meaning.

    Args:
        sums: of each block.
        masks: the run's final mask of each block, None for a block without one; None for a run without masks.
    """
    energies = [(each.products.diagonal() / max(1, each.tokens)).tolist() for each in sums]
    return {
        "energy": {
            **{term: _numbers(energy[index] for energy in energies) for index, term in enumerate(TERMS)},
            "total": _numbers(each.total.item() / max(1, each.tokens) for each in sums),
        },
        # Energies do not add up: total = Σ energies + 2 Σ cross.
        "cross": {
            pair: _numbers(each.products[at].item() / max(1, each.tokens) for each in sums)
            for pair, at in _PAIRS.items()
        },
        "share": {
            term: _numbers(_ratio(energy[index], sum(energy)) for energy in energies)
            for index, term in enumerate(TERMS)
        },
        "bound": {
            "actual": _numbers(each.actual.item() / max(1, each.tokens) for each in sums),
            "bound": _numbers(each.bound.item() / max(1, each.tokens) for each in sums),
            "tightness": _numbers(_ratio(each.actual.item(), each.bound.item()) for each in sums),
        },
        "top_channels": [_top_channels(each.channel_energy) for each in sums],
        # What the best choice of 30 % of the channels holds: the ceiling for `energy_held` below.
        "most_held": [held_by_top(each.channel_energy, each.channel_energy, TOP_SHARE) for each in sums],
        "mask": None if masks is None else agreement(masks, sums),
        "statistics": {name: agreement([getattr(each, name) for each in sums], sums) for name in STATISTICS},
    }


def agreement(weights: Sequence[Tensor | None], sums: Sequence[MismatchSums]) -> dict[str, Any]:
    """Whether weights of channels lie where their selection mismatch is; None where either has no order."""
    pairs = [
        None if weight is None else (weight.detach().cpu().double(), each.channel_energy.cpu())
        for weight, each in zip(weights, sums, strict=True)
    ]
    return {
        "rank_correlation": [pair and rank_correlation(*pair) for pair in pairs],
        "top_share": TOP_SHARE,
        "top_overlap": [pair and top_overlap(*pair, TOP_SHARE) for pair in pairs],
        "energy_held": [pair and held_by_top(*pair, TOP_SHARE) for pair in pairs],
        "chance": TOP_SHARE,
    }


def in_words(result: Mapping[str, Any]) -> str:
    """Whether the mask put its weight where the mismatch is, or, without a mask, whether sensitivity would have."""
    if not any(result["energy"]["total"]):
        return "The run and its target pass the same values through every block: there is no mismatch to point at."
    asked = result["mask"] or result["statistics"]["derivative"]
    who = "mask" if result["mask"] else "sensitivity E|φ′(z)|, which would be the mask,"
    correlations = [each for each in asked["rank_correlation"] if each is not None]
    if not correlations:
        return f"The {who} gives every channel the same weight: it points nowhere."
    correlation, held = _mean(correlations), _mean(asked["energy_held"])
    verdict = next(words for limit, words in _VERDICTS if correlation < limit)
    return (
        f"The {who} {verdict}: rank correlation {correlation:+.2f} over {counted(len(correlations), 'block')}; its top"
        f" {TOP_SHARE:.0%} of the channels hold {held:.0%} of the selection mismatch"
        f" (chance {TOP_SHARE:.0%}, at most {_mean(result['most_held']):.0%})."
    )


_VERDICTS = (
    (-0.1, "puts its weight away from the mismatch"),
    (0.1, "does not know where the mismatch is"),
    (0.3, "leans towards the mismatch, weakly"),
    (0.6, "puts much of its weight where the mismatch is"),
    (math.inf, "puts its weight where the mismatch is"),
)


def _top_channels(energy: Tensor) -> list[list[float]]:
    """The channels with the most energy and their shares of it; none where nothing differs."""
    total = energy.sum().item()
    if not total or not math.isfinite(total):
        return []
    top = energy.topk(min(_LISTED_CHANNELS, len(energy)))
    return [[c, e / total] for c, e in zip(top.indices.tolist(), top.values.tolist(), strict=True)]


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _numbers(values: Iterable[float | None]) -> list[float | None]:
    """JSON has no NaN: what is not finite is null."""
    return [value if value is not None and math.isfinite(value) else None for value in values]


def _mean(values: Iterable[float | None]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else math.nan
