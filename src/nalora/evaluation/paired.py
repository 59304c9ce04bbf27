"""Two models that answered the same questions, compared question by question.

Scores of 0 and 1 are compared by McNemar's exact test: questions that both models answer right, or both wrong, say
nothing about their difference, and of the others each model should have half. Other scores and the loss are compared
by the paired bootstrap: the same questions are drawn for both models. Intervals of the two models do not decide: they
contain the variation between easy and hard questions, which both models share, and overlap for differences that a
paired test detects. Neither test includes the variation between seeds (`significance`).

The bootstrap calls 16 % of equal models different with five questions and 6 % with thirty at a stated rate of 5 %
(normal differences; 20 % and 8 % with heavy tails), so with fewer than thirty nothing is decided.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from nalora.errors import counted
from nalora.evaluation.answers import Weighted
from nalora.evaluation.intervals import Interval
from nalora.evaluation.significance import ALPHA, Claim, Verdict, holm, verdict_of

FEWEST_QUESTIONS = 30
_DRAWS = 10_000
# Numbers of one block of draws, 32 MB in float64.
_BLOCK = 4_000_000
Test = Literal["McNemar's exact test", "paired bootstrap"]


class Pair(NamedTuple):
    """The scores of two models by the id of the question, each with its weight."""

    one: Mapping[str, Weighted]
    other: Mapping[str, Weighted]


@dataclass(frozen=True)
class PairedComparison:
    """A model compared with another on the same questions.

    Attributes:
        questions: their number.
        values: the measure of both.
        higher: the number of questions on which the first model's score is higher.
        lower: the number on which it is lower.
        test: the test that decided.
        bootstrap: the interval of the difference; that of McNemar's test is computed when it is read.
        p: of this pair alone.
        adjusted_p: after Holm's correction over all pairs that were compared together.
    """

    questions: int
    values: tuple[float, float]
    higher: int
    lower: int
    test: Test
    bootstrap: Interval | None
    p: float
    adjusted_p: float
    verdict: Verdict

    @property
    def difference(self) -> float:
        """First − second."""
        return self.values[0] - self.values[1]

    @cached_property
    def interval(self) -> Interval | None:
        """The 95 % interval of the difference, which excludes 0 where the test alone is significant."""
        if self.test == "paired bootstrap" or not (self.higher or self.lower):
            return self.bootstrap
        # Clopper's and Pearson's interval of the share of `higher` among the questions that differ.
        differ = self.higher + self.lower
        low = 0.0 if not self.higher else _solved(lambda share: 1 - _cumulative(self.higher - 1, differ, share))
        high = 1.0 if not self.lower else 1 - _solved(lambda share: 1 - _cumulative(self.lower - 1, differ, share))
        return Interval(*((2 * share - 1) * differ / self.questions for share in (low, high)))

    def evidence(self) -> str:
        """Return the number of questions that differ and the p-value."""
        if not (self.higher or self.lower):
            return "the same score on every question"
        counts = f"higher on {counted(self.higher, 'question')}, lower on {self.lower:,}"
        if self.verdict == "too few questions":
            return f"{counts}; not tested: fewer than {FEWEST_QUESTIONS} questions"
        return f"{counts}; {self.test}, p {self.short_p()}"

    def short_p(self) -> str:
        """Return the sign and the corrected p-value with two digits."""
        return "< 0.0001" if self.adjusted_p < 1e-4 else f"= {self.adjusted_p:.2g}"

    def sentence(self, measure: str, one: str, other: str) -> str:
        """Return the result in a sentence."""
        if not (self.higher or self.lower):
            return f"{measure}: {one} and {other} have the same score on every question."
        name = {"better": f"{one} is better than {other}", "worse": f"{one} is worse than {other}"}.get(
            self.verdict, f"no significant difference between {one} and {other}"
        )
        ends = f", 95 % interval {self.interval.low:+.4g} … {self.interval.high:+.4g}" if self.interval else ""
        size = f"{self.difference:+.4g}{ends}" if self.difference else "equal"
        if self.verdict == "too few questions":
            return f"{measure}: {one} − {other} {size}; {one} {self.evidence()}."
        return f"{measure}: {name} ({size}; {one} {self.evidence()})."


def compare_answers(
    pairs: Mapping[Claim, Pair], *, higher_is_better: bool, alpha: float = ALPHA
) -> dict[Claim, PairedComparison]:
    """Compare the first of each pair with the second, corrected for the number of pairs.

    Pairs that did not answer the same questions are left out of the result.
    """
    found: dict[Claim, PairedComparison] = {}
    by_questions: dict[tuple[str, ...], dict[Claim, Pair]] = {}
    for claim, pair in pairs.items():
        if pair.one and pair.one.keys() == pair.other.keys():
            by_questions.setdefault(tuple(sorted(pair.one)), {})[claim] = pair
    for ids, same in by_questions.items():
        found |= _compared(ids, same, max(_DRAWS, 80 * len(pairs)))
    tested = {claim: one.p for claim, one in found.items() if one.verdict != "too few questions"}
    adjusted = holm(tested)
    for claim, p in adjusted.items():
        is_better = (found[claim].difference > 0) == higher_is_better
        found[claim] = replace(found[claim], adjusted_p=p, verdict=verdict_of(p, alpha, is_better))
    return {claim: found[claim] for claim in pairs if claim in found}


def _compared(ids: tuple[str, ...], pairs: Mapping[Claim, Pair], draws: int) -> dict[Claim, PairedComparison]:
    """Compare pairs that answered these questions, all with the same draws, before the correction."""
    # [questions, 4 per pair]: score and weight of the first model, then of the second.
    columns = torch.tensor(
        [[number for pair in pairs.values() for side in pair for number in side[key]] for key in ids],
        dtype=torch.float64,
    )
    differences = columns[:, 0::4] / columns[:, 1::4] - columns[:, 2::4] / columns[:, 3::4]
    sums = columns.sum(0)
    ones, others = (sums[0::4] / sums[1::4]).tolist(), (sums[2::4] / sums[3::4]).tolist()
    binary = _binary(columns)
    drawn = None if all(binary) else _resampled(columns, draws)
    result = {}
    for i, claim in enumerate(pairs):
        higher, lower = int((differences[:, i] > 0).sum()), int((differences[:, i] < 0).sum())
        verdict: Verdict = "not distinguishable"
        interval, p = None, 1.0
        if binary[i]:
            p = min(1.0, 2 * _cumulative(min(higher, lower), higher + lower, 0.5)) if higher != lower else 1.0
        elif drawn is not None and bool(differences[:, i].isfinite().all()):
            ends = drawn[:, i].quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
            interval = Interval(*ends)
            beyond = min(int((drawn[:, i] <= 0).sum()), int((drawn[:, i] >= 0).sum()))
            p = min(1.0, 2 * (beyond + 1) / (len(drawn) + 1))
            verdict = "too few questions" if len(ids) < FEWEST_QUESTIONS else verdict
        test: Test = "McNemar's exact test" if binary[i] else "paired bootstrap"
        result[claim] = PairedComparison(
            len(ids), (ones[i], others[i]), higher, lower, test, interval, p, p, verdict
        )  # fmt: skip
    return result


def _binary(columns: Tensor) -> list[bool]:
    """Whether all scores of a pair are 0 or 1, with the same weight for every question."""
    scores, weights = columns[:, 0::2], columns[:, 1::2]
    fits = (((scores == 0) | (scores == 1)) & (weights == 1)).all(0)
    return [bool(fits[i] and fits[i + 1]) for i in range(0, len(fits), 2)]


def _resampled(columns: Tensor, draws: int) -> Tensor:
    """Return [draws, pairs]: the difference of each pair on questions drawn with replacement; the seed is fixed."""
    n, generator = len(columns), torch.Generator().manual_seed(0)
    columns = columns.nan_to_num(posinf=0.0, neginf=0.0)  # such pairs are not used
    results = []
    size = max(1, _BLOCK // n)
    for start in range(0, draws, size):
        count = min(size, draws - start)
        chosen = torch.randint(n, (count, n), generator=generator)
        times = torch.zeros(count, n, dtype=torch.float64).scatter_add_(1, chosen, torch.ones_like(chosen).double())
        sums = times @ columns
        results.append(sums[:, 0::4] / sums[:, 1::4] - sums[:, 2::4] / sums[:, 3::4])
    return torch.cat(results)


def _cumulative(most: int, n: int, share: float) -> float:
    """Return P(X ≤ most) of a binomial variable of n draws."""
    if share <= 0 or most >= n:
        return 1.0
    if share >= 1:
        return 0.0
    start = math.lgamma(n + 1)
    return math.fsum(
        math.exp(
            start - math.lgamma(k + 1) - math.lgamma(n - k + 1) + k * math.log(share) + (n - k) * math.log1p(-share)
        )
        for k in range(most + 1)
    )


def _solved(tail: Callable[[float], float], level: float = ALPHA / 2) -> float:
    """Return the share at which a tail that grows with it reaches the level."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if tail(middle) < level else (low, middle)
    return (low + high) / 2
