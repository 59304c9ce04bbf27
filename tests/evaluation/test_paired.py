"""Paired comparisons against their definitions, and how often they call equal models different."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from scipy import stats

from nalora.evaluation.paired import FEWEST_QUESTIONS, Pair, PairedComparison, compare_answers


def scored(values, weight=1.0):
    return {f"q{i}": (float(value), weight) for i, value in enumerate(values)}


def compared(one, other, *, higher_is_better=True, **options) -> PairedComparison:
    pair = Pair(scored(one), scored(other))
    return compare_answers({0: pair}, higher_is_better=higher_is_better, **options)[0]


def of_counts(higher, lower, both=40) -> PairedComparison:
    one = [1] * higher + [0] * lower + [1] * both
    return compared(one, [0] * higher + [1] * lower + [1] * both)


@pytest.mark.parametrize(("higher", "lower"), [*itertools.product((0, 1, 5, 6, 17), repeat=2)])
def test_mcnemars_exact_test_is_the_binomial_test_of_the_questions_that_differ(higher, lower):
    result = of_counts(higher, lower)
    expected = stats.binomtest(higher, higher + lower).pvalue if higher + lower else 1.0
    assert result.test == "McNemar's exact test"
    assert result.p == pytest.approx(expected)
    assert (result.higher, result.lower) == (higher, lower)
    assert result.difference == pytest.approx((higher - lower) / (higher + lower + 40))
    verdict = ("better" if higher > lower else "worse") if expected <= 0.05 else "not distinguishable"
    assert result.verdict == verdict
    if higher + lower:
        share = stats.binomtest(higher, higher + lower).proportion_ci(method="exact")
        ends = [(2 * end - 1) * (higher + lower) / (higher + lower + 40) for end in (share.low, share.high)]
        assert result.interval == pytest.approx(ends, abs=1e-9)
        # The interval and the test agree.
        assert (ends[0] > 0 or ends[1] < 0) == (expected <= 0.05)


def test_questions_that_both_answer_alike_change_nothing():
    assert of_counts(9, 1, both=0).p == of_counts(9, 1, both=5000).p


def test_other_scores_are_compared_by_the_paired_bootstrap():
    chance = random.Random(0)
    base = [chance.random() for _ in range(200)]
    better = [min(1.0, value + 0.01) for value in base]
    result = compared(better, base)
    assert result.test == "paired bootstrap"
    assert result.verdict == "better"
    assert result.interval.low > 0
    assert compared(base, better).verdict == "worse"
    assert compared(better, base, higher_is_better=False).verdict == "worse"
    # Of unpaired questions, 0.01 of a standard deviation of 0.29 is nothing.
    shuffled = better[:]
    chance.shuffle(shuffled)
    assert compared(shuffled, base).verdict == "not distinguishable"


def test_the_bootstrap_interval_is_that_of_weighted_means():
    """As many tokens as in losses.jsonl: a long answer counts more than a short one."""
    chance = random.Random(1)
    tokens = [chance.choice((1, 20)) for _ in range(300)]
    one, other = ({f"q{i}": (n * chance.gauss(mean, 0.5), float(n)) for i, n in enumerate(tokens)} for mean in (2, 2.1))
    result = compare_answers({0: Pair(one, other)}, higher_is_better=False)[0]
    difference = sum(one[k][0] - other[k][0] for k in one) / sum(tokens)
    assert result.difference == pytest.approx(difference)
    residuals = [(one[k][0] - other[k][0] - difference * one[k][1]) / sum(tokens) for k in one]
    half = 1.96 * math.sqrt(sum(residual**2 for residual in residuals))
    assert result.interval == pytest.approx((difference - half, difference + half), abs=0.1 * half)


@pytest.mark.parametrize("kind", ["shares", "scores"])
def test_equal_models_are_called_different_at_most_as_often_as_stated(kind):
    """Three equal models, 200 reports of 60 questions: any false claim in at most 5 %, and chance on top of it."""
    chance = random.Random(5)
    claims = 0
    for _ in range(200):
        easy = [chance.gauss(0, 1) for _ in range(60)]
        runs = [[value + chance.gauss(0, 0.5) for value in easy] for _ in range(3)]
        runs = [[float(value > 0) for value in run] for run in runs] if kind == "shares" else runs
        pairs = {(a, b): Pair(scored(runs[a]), scored(runs[b])) for a in range(3) for b in range(a)}
        claims += any(
            c.verdict != "not distinguishable" for c in compare_answers(pairs, higher_is_better=True).values()
        )
    assert claims / 200 <= 0.05 + 0.046


def test_holms_correction_covers_all_pairs():
    one, other = scored([1] * 6 + [1] * 40), scored([0] * 6 + [1] * 40)
    alone = compare_answers({0: Pair(one, other)}, higher_is_better=True)[0]
    assert (alone.verdict, alone.p) == ("better", pytest.approx(2**-5))
    many = compare_answers({i: Pair(one, other) for i in range(2)}, higher_is_better=True)
    assert [result.verdict for result in many.values()] == ["not distinguishable"] * 2
    assert many[0].adjusted_p == pytest.approx(2**-4)
    # However many pairs, a certain difference of scores stays significant: there are enough draws.
    certain = Pair(scored([i / 99 for i in range(99)]), scored([i / 99 - 0.5 for i in range(99)]))
    results = compare_answers(dict.fromkeys(range(300), certain), higher_is_better=True)
    assert {result.verdict for result in results.values()} == {"better"}


def test_few_questions_decide_only_what_an_exact_test_can():
    few = [0.5] * (FEWEST_QUESTIONS - 1)
    result = compared(few, [0.0] * len(few))
    assert result.verdict == "too few questions"
    assert result.sentence("f1", "adapted", "base") == (
        "f1: adapted − base +0.5, 95 % interval +0.5 … +0.5; adapted higher on 29 questions, lower on 0; not tested:"
        " fewer than 30 questions."
    )
    assert compared([1] * 6, [0] * 6).verdict == "better"


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_nothing_is_claimed_of_a_diverged_run(broken):
    values = [1.0 + i / 100 for i in range(50)]
    pairs = {0: Pair(scored([broken, *values[1:]]), scored(values)), 1: Pair(scored(values), scored([9.0] * 50))}
    results = compare_answers(pairs, higher_is_better=False)
    assert results[0].verdict == "not distinguishable"
    assert results[1].verdict == "better"


def test_other_questions_are_not_compared():
    pairs = {0: Pair(scored([1, 0]), scored([1, 0, 1])), 1: Pair({}, {}), 2: Pair(scored([1]), scored([1]))}
    assert list(compare_answers(pairs, higher_is_better=True)) == [2]


@pytest.mark.parametrize(("one", "other", "sentence"), [
    ([1, 0, 1], [1, 0, 1], "accuracy: adapted and base have the same score on every question."),
    ([1, 0], [0, 1], "accuracy: no significant difference between adapted and base (equal; adapted higher on 1"
                     " question, lower on 1; McNemar's exact test, p = 1)."),
    ([1] * 9, [0] * 9, "accuracy: adapted is better than base (+1, 95 % interval +0.3275 … +1; adapted higher on 9"
                       " questions, lower on 0; McNemar's exact test, p = 0.0039)."),
])  # fmt: skip
def test_sentences(one, other, sentence):
    assert compared(one, other).sentence("accuracy", "adapted", "base") == sentence
