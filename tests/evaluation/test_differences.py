"""Student's interval of a difference: exact quantiles, and the coverage that it promises."""

from __future__ import annotations

import random

import pytest

from nalora.evaluation.differences import difference, student_quantile


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(1, 12.706205), (2, 4.302653), (4, 2.776445), (9, 2.262157), (30, 2.042272)]
)
def test_quantiles_are_the_printed_table(freedom, quantile):
    assert student_quantile(freedom) == pytest.approx(quantile, abs=1e-5)


def test_freedom_need_not_be_whole():
    assert student_quantile(5) < student_quantile(4.5) < student_quantile(4)
    assert student_quantile(1e5) == pytest.approx(1.95999, abs=1e-4)


@pytest.mark.parametrize("paired", [True, False])
@pytest.mark.parametrize("spread", [1.0, 4.0])
def test_the_interval_holds_the_true_difference_95_times_in_100(paired, spread):
    chance = random.Random(3)
    hits, draws = 0, 800
    for _ in range(draws):
        shared = [chance.gauss(0, 2) if paired else 0.0 for _ in range(3)]
        first = {seed: shared[seed] + chance.gauss(1.5, spread) for seed in range(3)}
        second = {seed + (not paired): shared[seed] + chance.gauss(0.5, 1) for seed in range(3)}
        low, high = difference(first, second)
        hits += low <= 1.0 <= high
    assert 0.93 <= hits / draws <= 0.985  # Welch's is a little wide with three seeds


def test_sharing_seeds_removes_what_they_share():
    first, second = {0: 10.0, 1: 20.0, 2: 30.1}, {0: 9.0, 1: 19.1, 2: 29.0}
    assert difference(first, second).low > 0
    assert difference(first, {seed + 1: value for seed, value in second.items()}).low < 0


def test_welch_by_hand():
    """Variances 1 and 4 of three values each: error √(5/3), freedom 25/(1 + 16)·2."""
    low, high = difference({0: 1.0, 1: 2.0, 2: 3.0}, {3: 2.0, 4: 4.0, 5: 6.0})
    half = student_quantile(50 / 17) * (5 / 3) ** 0.5
    assert (low, high) == pytest.approx((-2 - half, -2 + half))


@pytest.mark.parametrize(
    ("first", "second"),
    [({0: 1.0}, {0: 2.0, 1: 3.0}), ({0: 1.0, 1: 2.0}, {}), ({0: 0.5, 1: 0.5}, {0: 0.4, 1: 0.4})],
    ids=["one seed", "none", "no spread"],
)
def test_no_interval_where_none_can_be_had(first, second):
    assert difference(first, second) is None
