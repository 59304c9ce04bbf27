"""Significance of differences between results, for tables, sentences, reports and studies.

Over seeds the test is Student's, on differences paired by seed: it keeps its stated error rate with the usual three to
five seeds. A percentile bootstrap over five seeds calls 16 % of equal methods different at a stated rate of 5 %; its
interval is reported next to Student's for readers who expect it, and decides nothing.

Below three seeds nothing is decided. With two seeds, shares of a hundred questions often differ by the same number, and
seem certain: ten arms equal to the baseline gave a false claim in every second study. With more seeds, differences that
are all equal are taken as equal within the resolution of the measure (`deviation`).

Single runs are compared by the questions that they answered (`paired`), which does not include the variation between
seeds. Every family of comparisons is corrected by Holm's method.
"""

from __future__ import annotations

import itertools
import math
import statistics
from bisect import bisect_left
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, TypeVar

import torch

from nalora.errors import counted, missing_package
from nalora.evaluation.intervals import Interval

ALPHA = 0.05
POWER = 0.8
FEWEST_SEEDS = 3
_MOST_SEEDS = 10_000
# Relative rounding error of differences between equal shares.
_ROUNDING = 1e-9
_DRAWS = 2_000

Verdict = Literal["better", "worse", "not distinguishable", "too few seeds", "too few questions"]
Claim = TypeVar("Claim", bound=Hashable)


@dataclass(frozen=True)
class Comparison:
    """A method compared with a baseline over the seeds that both have.

    Attributes:
        differences: method − baseline by seed.
        finest: the smallest step of the measure, see `deviation`.
        family: the number of comparisons in Holm's correction: all that were planned together for one measure.
        p: None below three seeds.
        adjusted_p: after Holm's correction.
    """

    method: str
    baseline: str
    differences: tuple[float, ...]
    finest: float
    family: int
    p: float | None
    adjusted_p: float | None
    higher_is_better: bool
    alpha: float = ALPHA

    @property
    def seeds(self) -> int:
        """The number of shared seeds."""
        return len(self.differences)

    @property
    def difference(self) -> float:
        """The mean difference; NaN without a shared seed."""
        return statistics.fmean(self.differences) if self.differences else math.nan

    @property
    def interval(self) -> Interval | None:
        """Student's interval, not corrected for other comparisons; None below two seeds."""
        return student_interval(self.differences, self.alpha, self.finest) if self.seeds > 1 else None

    @property
    def bootstrap(self) -> Interval | None:
        """See `bootstrap_interval`; None below two seeds."""
        return bootstrap_interval(self.differences) if self.seeds > 1 else None

    @property
    def verdict(self) -> Verdict:
        """The result of the test."""
        if self.adjusted_p is None:
            return "too few seeds"
        return verdict_of(self.adjusted_p, self.alpha, (self.difference > 0) == self.higher_is_better)

    @property
    def seeds_to_decide(self) -> int | None:
        """The number of seeds that a difference of this size needs; None if it is decided or cannot be estimated."""
        if self.verdict != "not distinguishable":
            return None
        return seeds_to_decide(self.differences, self.alpha / self.family, self.finest)

    def numbers(self) -> dict[str, Any]:
        """Return the numbers for a JSON file."""
        names = ("method", "baseline", "seeds", "difference", "interval", "bootstrap", "p", "adjusted_p", "verdict",
                 "seeds_to_decide")  # fmt: skip
        return {name: getattr(self, name) for name in names}

    def sentence(self, measure: str) -> str:
        """Return the result in a sentence."""
        size = f"{self.difference:+.4g} {measure}"
        if not self.seeds:
            return f"{self.method} and {self.baseline} have no seed in common: {measure} not compared."
        if self.interval is None:
            return f"{self.method}: {size} compared with {self.baseline}, with one seed, which decides nothing."
        low, high = self.interval
        if not low and not high:
            seeds = counted(self.seeds, "seed")
            return f"{self.method} and {self.baseline} have the same {measure} with every seed ({seeds})."
        numbers = f"{size}, 95 % interval {low:+.4g} … {high:+.4g} over {counted(self.seeds, 'seed')}"
        if self.verdict in ("better", "worse"):
            return (
                f"{self.method} is {self.verdict} than {self.baseline}: {numbers}, adjusted p = {self.adjusted_p:.2g}."
            )
        if self.verdict == "too few seeds":
            return f"{self.method} compared with {self.baseline}: {numbers}, which are too few for a decision."
        more = "no practical number of seeds would decide it"
        if self.seeds_to_decide:
            more = f"about {self.seeds_to_decide} seeds would decide a difference of this size"
        return f"{self.method} is not distinguishable from {self.baseline} at this size: {numbers}; {more}."


def compare_methods(
    values: Mapping[str, Mapping[int, float]],
    pairs: Sequence[tuple[str, str]],
    *,
    higher_is_better: bool,
    alpha: float = ALPHA,
    planned: int = 0,
) -> list[Comparison]:
    """Compare each method with its baseline, corrected for the number of pairs.

    Args:
        values: results by method and seed; runs of the same seed share data order and initialisation.
        pairs: (method, baseline).
        higher_is_better: True for an accuracy, False for a loss.
        alpha: the probability of any false claim among all pairs.
        planned: the number of planned pairs, if larger: failed runs must not make other claims easier.
    """
    differences = {
        (method, baseline): tuple(
            values[method][seed] - values[baseline][seed]
            for seed in sorted(values[method].keys() & values[baseline].keys())
        )
        for method, baseline in pairs
    }
    finest = resolution(values)
    tested = {pair: _p_value(by_seed, finest) for pair, by_seed in differences.items() if len(by_seed) >= FEWEST_SEEDS}
    family = max(planned, len(tested))
    adjusted = holm(tested, family)
    return [
        Comparison(*pair, by_seed, finest, family, tested.get(pair), adjusted.get(pair), higher_is_better, alpha)
        for pair, by_seed in differences.items()
    ]


def resolution(values: Mapping[str, Mapping[int, float]]) -> float:
    """Return the smallest difference between any two results, an estimate of the measure's step; 0 if all are equal."""
    ordered = sorted(value for by_seed in values.values() for value in by_seed.values())
    rounding = _ROUNDING * max(map(abs, ordered), default=0.0)
    return min((high - low for low, high in itertools.pairwise(ordered) if high - low > rounding), default=0.0)


def deviation(differences: Sequence[float], finest: float = 0.0) -> float:
    """Return the standard deviation; if all differences are equal, that of a rounding error.

    A value rounded to steps of `finest` has an error with a standard deviation of finest/√12.
    """
    spread = statistics.stdev(differences)
    return spread if spread > _ROUNDING * max(map(abs, differences)) else finest / math.sqrt(12)


def student_interval(differences: Sequence[float], alpha: float = ALPHA, finest: float = 0.0) -> Interval:
    """Return the interval of the mean of normal values; `finest` as for `deviation`.

    scipy's `ttest_rel` returns NaN for differences that are all equal, as shares of few questions often are.
    """
    mean, n = statistics.fmean(differences), len(differences)
    half = _student_quantile(n - 1, alpha) * deviation(differences, finest) / math.sqrt(n)
    return Interval(mean - half, mean + half)


def bootstrap_interval(differences: Sequence[float]) -> Interval:
    """Return the percentile bootstrap interval of the mean; the seed is fixed."""
    n = len(differences)
    drawn = torch.randint(n, (_DRAWS, n), generator=torch.Generator().manual_seed(0))
    means = torch.tensor(differences, dtype=torch.float64)[drawn].mean(1)
    return Interval(*means.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist())


def _p_value(differences: Sequence[float], finest: float) -> float:
    spread, mean = deviation(differences, finest), abs(statistics.fmean(differences))
    if mean == 0 or spread == 0:
        return 1.0
    return float(2 * scipy_stats().t.sf(mean / (spread / math.sqrt(len(differences))), len(differences) - 1))


def holm(p_values: Mapping[Claim, float], family: int = 0) -> dict[Claim, float]:
    """Return Holm-adjusted p-values: the probability of any false claim stays below alpha.

    If `family` exceeds the number of p-values, the missing ones count as the largest.
    """
    adjusted: dict[Claim, float] = {}
    largest = 0.0
    for place, (claim, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        largest = max(largest, min(1.0, (max(family, len(p_values)) - place) * p))
        adjusted[claim] = largest
    return adjusted


def seeds_to_decide(differences: Sequence[float], alpha: float, finest: float = 0.0) -> int | None:
    """Return the number of seeds, at least three, at which a difference of this mean is significant with power 0.8.

    None if the mean is 0 or if 10,000 seeds would not suffice; `finest` as for `deviation`.
    """
    mean, spread = abs(statistics.fmean(differences)), deviation(differences, finest)
    if mean == 0:
        return None
    effect = mean / spread if spread else math.inf

    def power(n: int) -> float:
        return float(scipy_stats().nct.sf(_student_quantile(n - 1, alpha), n - 1, effect * math.sqrt(n)))

    low = high = FEWEST_SEEDS
    while power(high) < POWER:
        if high == _MOST_SEEDS:
            return None
        low, high = high, min(2 * high, _MOST_SEEDS)
    return low + bisect_left(range(low, high), True, key=lambda n: power(n) >= POWER)


def smallest_effect(differences: Sequence[float], alpha: float, finest: float = 0.0) -> float:
    """Return the smallest true difference that a test with this spread and number of seeds finds with power 0.8.

    `alpha` is the level of one test: with Holm's correction over m comparisons, alpha/m; `finest` as for `deviation`.
    """
    n = len(differences)
    threshold = _student_quantile(n - 1, alpha)
    low, high = 0.0, 2.0 * threshold + 10.0  # non-centrality: far above the quantile the power is 1
    for _ in range(60):
        middle = (low + high) / 2
        if scipy_stats().nct.sf(threshold, n - 1, middle) < POWER:
            low = middle
        else:
            high = middle
    return high * deviation(differences, finest) / math.sqrt(n)


def verdict_of(adjusted_p: float, alpha: float, is_better: bool) -> Verdict:
    """Return the result of a test after Holm's correction."""
    if adjusted_p > alpha:
        return "not distinguishable"
    return "better" if is_better else "worse"


@lru_cache(maxsize=1024)
def _student_quantile(freedom: int, alpha: float) -> float:
    return float(scipy_stats().t.ppf(1 - alpha / 2, freedom))


def scipy_stats() -> Any:
    """Return `scipy.stats`; raise a NALoRAError if scipy is not installed."""
    try:
        from scipy import stats
    except ImportError as error:
        raise missing_package("statistics", "scipy", "to compute statistics over seeds", "'nalora[report]'") from error
    return stats
