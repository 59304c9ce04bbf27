"""What results over seeds say of methods: differences paired by seed, with intervals, corrected for many comparisons.

The verdict is Student's, on differences paired by seed: with the three to five seeds that anybody runs it keeps its
stated rate. A percentile bootstrap over five seeds calls 16 % of equal methods different where it says 5 %; its
interval is given beside, for those who expect it, and decides nothing.

Below three seeds nothing is decided. Shares of a hundred questions often differ by the same number with two seeds, and
seem certain then: ten arms equal to the baseline gave a false claim in every second study. With more seeds, differences
that are all equal are taken as equal within what the measure can tell (`deviation`).
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Hashable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeVar

import torch

from nalora.errors import counted
from nalora.evaluation.differences import distributions, student_quantile
from nalora.evaluation.intervals import Interval

ALPHA = 0.05
POWER = 0.8
FEWEST_SEEDS = 3
_MOST_SEEDS = 10_000
# Shares of the same answers, divided and subtracted, differ by as much as rounding does.
_ROUNDING = 1e-9
_DRAWS = 2_000

Verdict = Literal["better", "worse", "not distinguishable", "too few seeds"]
Claim = TypeVar("Claim", bound=Hashable)


class Comparison(NamedTuple):
    """A method beside the baseline, over the seeds that both have."""

    method: str
    baseline: str
    seeds: int
    difference: float
    interval: Interval | None  # Student's, of this comparison alone; None below two seeds
    bootstrap: Interval | None
    p: float | None  # None below three seeds
    adjusted_p: float | None  # Holm's, over the family: all comparisons of one measure that were planned together
    verdict: Verdict
    seeds_to_decide: int | None  # for a difference as large as this, None where it is decided or nobody can say


def compare(
    values: Mapping[str, Mapping[int, float]], baseline: str, *, higher_is_better: bool, alpha: float = ALPHA
) -> list[Comparison]:
    """Every other method against the baseline.

    Args:
        values: a result by method and seed; pairs of the same seed share data order and start.
        baseline: the method the others are compared with.
        higher_is_better: of an accuracy; not of a loss.
        alpha: how often equal methods may be called different, over all comparisons of this call together.
    """
    pairs = [(method, baseline) for method in values if method != baseline]
    return compare_pairs(values, pairs, higher_is_better=higher_is_better, alpha=alpha)


def compare_pairs(
    values: Mapping[str, Mapping[int, float]],
    pairs: Sequence[tuple[str, str]],
    *,
    higher_is_better: bool,
    alpha: float = ALPHA,
    planned: int = 0,
) -> list[Comparison]:
    """Each method against its own baseline, corrected for so many pairs.

    Args:
        values: as for `compare`.
        pairs: methods and what each is compared with.
        higher_is_better: as for `compare`.
        alpha: as for `compare`.
        planned: how many pairs it was to be, where that is more: what failed must not make the rest easier to claim.
    """
    differences = {pair: _differences(*(values[name] for name in pair)) for pair in pairs}
    finest = resolution(values)
    tested = {pair: _p_value(each, finest) for pair, each in differences.items() if len(each) >= FEWEST_SEEDS}
    family = max(planned, len(tested))
    adjusted = holm(tested, family)
    return [
        _comparison(*pair, each, finest, tested.get(pair), adjusted.get(pair), family, higher_is_better, alpha)
        for pair, each in differences.items()
    ]


def resolution(values: Mapping[str, Mapping[int, float]]) -> float:
    """The smallest step that the measure is seen to take, between any two results; 0 where all are the same."""
    ordered = sorted(value for by_seed in values.values() for value in by_seed.values())
    rounding = _ROUNDING * max(map(abs, ordered), default=0.0)
    return min((high - low for low, high in itertools.pairwise(ordered) if high - low > rounding), default=0.0)


def deviation(differences: Sequence[float], finest: float = 0.0) -> float:
    """The standard deviation; of differences that are all equal, that of what the measure rounds away.

    A value known to a step `finest` may lie anywhere within it, with a standard deviation of finest/√12.
    """
    found = statistics.stdev(differences)
    return found if found > _ROUNDING * max(map(abs, differences)) else finest / math.sqrt(12)


def _differences(method: Mapping[int, float], baseline: Mapping[int, float]) -> list[float]:
    """By the seeds that both have."""
    return [method[seed] - baseline[seed] for seed in sorted(method.keys() & baseline.keys())]


def _comparison(
    method: str,
    baseline: str,
    differences: Sequence[float],
    finest: float,
    p: float | None,
    adjusted: float | None,
    comparisons: int,
    higher_is_better: bool,
    alpha: float,
) -> Comparison:
    n = len(differences)
    mean = statistics.fmean(differences) if differences else math.nan
    student = student_interval(differences, alpha, finest) if n > 1 else None
    drawn = bootstrap_interval(differences) if n > 1 else None
    if p is None or adjusted is None:
        return Comparison(method, baseline, n, mean, student, drawn, None, None, "too few seeds", None)
    verdict: Verdict = "not distinguishable"
    if adjusted <= alpha:
        verdict = "better" if (mean > 0) == higher_is_better else "worse"
    enough = seeds_to_decide(differences, alpha / comparisons, finest) if verdict == "not distinguishable" else None
    return Comparison(method, baseline, n, mean, student, drawn, p, adjusted, verdict, enough)


def student_interval(differences: Sequence[float], alpha: float = ALPHA, finest: float = 0.0) -> Interval:
    """The interval of the mean of normal values; `finest` as for `deviation`."""
    mean, n = statistics.fmean(differences), len(differences)
    half = student_quantile(n - 1, alpha) * deviation(differences, finest) / math.sqrt(n)
    return Interval(mean - half, mean + half)


def bootstrap_interval(differences: Sequence[float], seed: int = 0) -> Interval:
    """The percentile interval of the mean over values drawn again with replacement."""
    drawn = torch.randint(len(differences), (_DRAWS, len(differences)), generator=torch.Generator().manual_seed(seed))
    means = torch.tensor(differences, dtype=torch.float64)[drawn].mean(1)
    low, high = means.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Interval(low, high)


def holm(p_values: Mapping[Claim, float], family: int = 0) -> dict[Claim, float]:
    """Holm's adjustment: the chance of any false claim among all stays below alpha.

    A `family` of more than these counts those that are missing as the least likely ones.
    """
    adjusted: dict[Claim, float] = {}
    largest = 0.0
    for place, (name, p) in enumerate(sorted(p_values.items(), key=lambda each: each[1])):
        largest = max(largest, min(1.0, (max(family, len(p_values)) - place) * p))
        adjusted[name] = largest
    return adjusted


def seeds_to_decide(differences: Sequence[float], alpha: float, finest: float = 0.0) -> int | None:
    """With how many seeds, three or more, a difference as large as this one's mean is found four times out of five.

    None where there is no difference at all, or where 10,000 seeds would not suffice; `finest` as for `deviation`.
    """
    mean, spread = abs(statistics.fmean(differences)), deviation(differences, finest)
    if mean == 0:
        return None
    effect = mean / spread if spread else math.inf

    def power(n: int) -> float:
        return float(distributions().nct.sf(student_quantile(n - 1, alpha), n - 1, effect * math.sqrt(n)))

    low = high = FEWEST_SEEDS
    while power(high) < POWER:
        if high == _MOST_SEEDS:
            return None
        low, high = high, min(2 * high, _MOST_SEEDS)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if power(middle) >= POWER else (middle + 1, high)
    return high


def sentence(comparison: Comparison, measure: str, unit: str = "") -> str:
    """What may be said of one comparison, in plain words."""
    each = comparison
    size = f"{each.difference:+.4g}{unit} {measure}"
    if not each.seeds:
        return f"{each.method} and {each.baseline} have no seed in common: {measure} not compared."
    if each.interval is None:
        return f"{each.method}: {size} beside {each.baseline} with one seed, from which nothing follows."
    low, high = each.interval
    numbers = f"{size}, 95 % interval {low:+.4g} … {high:+.4g} over {counted(each.seeds, 'seed')}"
    if each.verdict in ("better", "worse"):
        return f"{each.method} is {each.verdict} than {each.baseline}: {numbers}, adjusted p = {each.adjusted_p:.2g}."
    if each.verdict == "too few seeds":
        return f"{each.method} beside {each.baseline}: {numbers}, which are too few to tell them apart by."
    more = (
        f"about {each.seeds_to_decide} seeds would decide a difference of this size"
        if each.seeds_to_decide
        else "no practical number of seeds would decide it"
    )
    return f"{each.method} is not distinguishable from {each.baseline} at this size: {numbers}; {more}."


def _p_value(differences: Sequence[float], finest: float) -> float:
    spread, mean = deviation(differences, finest), abs(statistics.fmean(differences))
    if mean == 0 or spread == 0:
        return 1.0
    return float(2 * distributions().t.sf(mean / (spread / math.sqrt(len(differences))), len(differences) - 1))
