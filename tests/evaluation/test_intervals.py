"""Intervals have their stated coverage."""

from __future__ import annotations

import random

import pytest

from nalora.errors import NALoRAError
from nalora.evaluation.intervals import bootstrap, wilson


def test_wilson_equals_textbook_values():
    low, high = wilson(8, 10)
    assert (low, high) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert wilson(0, 20)[0] == 0.0 < wilson(0, 20)[1]
    assert wilson(20, 20)[1] == 1.0 > wilson(20, 20)[0]


@pytest.mark.parametrize("share", [0.05, 0.4, 0.9])
def test_wilson_covers_the_truth_19_times_of_20(share):
    chance = random.Random(1)
    covered = 0
    for _ in range(2000):
        low, high = wilson(sum(chance.random() < share for _ in range(100)), 100)
        covered += low <= share <= high
    assert 0.93 <= covered / 2000 <= 0.98


def test_bootstrap_of_a_mean_is_near_the_normal_one_and_repeats():
    chance = random.Random(2)
    values = [chance.gauss(3, 2) for _ in range(400)]

    def mean(drawn):
        return {"mean": sum(values[i] for i in drawn) / len(drawn)}

    interval = bootstrap(400, mean)["mean"]
    middle, half = sum(values) / 400, 1.96 * 2 / 20
    assert interval == pytest.approx((middle - half, middle + half), abs=0.05)
    assert bootstrap(400, mean)["mean"] == interval


def test_bootstrap_leaves_a_fortieth_of_the_draws_on_either_side():
    # Each draw measures its own place in the order: the interval is then the percentiles themselves.
    places = iter(range(1000))
    assert bootstrap(1, lambda drawn: {"place": float(next(places))})["place"] == (25, 974)


def test_without_examples_wilson_is_0_to_1_and_bootstrap_is_refused():
    assert wilson(0, 0) == (0, 1)
    with pytest.raises(NALoRAError, match="no examples"):
        bootstrap(0, lambda drawn: {})
