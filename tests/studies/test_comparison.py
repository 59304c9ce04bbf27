"""The statistics of results accept and reject at their stated rates, and say so in plain words."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nalora.studies.comparison import bootstrap_interval, compare, holm, seeds_to_decide, sentence, student_interval

METHODS = [f"method {i}" for i in range(10)]


def results(chance, seeds, differences, noise=1.0):
    """Results that share a part by seed, as runs do that share data order and start."""
    shared = {seed: chance.gauss(0, 3 * noise) for seed in range(seeds)}

    def of(mean):
        return {seed: 50 + shared[seed] + mean + chance.gauss(0, noise / math.sqrt(2)) for seed in range(seeds)}

    return {"lora": of(0.0), **{method: of(d) for method, d in zip(METHODS, differences, strict=False)}}


@pytest.mark.parametrize("seeds", [3, 5])
def test_equal_methods_are_called_different_at_most_as_often_as_stated(seeds):
    """Ten methods equal to LoRA, 300 studies: any false claim in at most 5 % of them, within three deviations."""
    chance = random.Random(seeds)
    claims = 0
    for _ in range(300):
        comparisons = compare(results(chance, seeds, [0.0] * 10), "lora", higher_is_better=True)
        claims += any(each.verdict != "not distinguishable" for each in comparisons)
    assert claims / 300 <= 0.05 + 0.038


def test_one_comparison_rejects_at_its_rate_and_the_bootstrap_would_not():
    chance = random.Random(1)
    rejected = drawn = 0
    for _ in range(500):
        (each,) = compare(results(chance, 5, [0.0]), "lora", higher_is_better=True)
        rejected += each.verdict != "not distinguishable"
        drawn += not each.bootstrap.low <= 0 <= each.bootstrap.high
    assert rejected / 500 == pytest.approx(0.05, abs=0.03)
    assert drawn / 500 > 0.09, "why the percentile bootstrap does not decide"


@pytest.mark.parametrize("effect", [2.0, 1.0])
def test_a_difference_is_found_as_often_as_the_power_says(effect):
    """The number of seeds that `seeds_to_decide` names finds the difference four times out of five, fewer do not."""
    half = math.sqrt(0.5)
    seeds = seeds_to_decide([effect - half, effect + half], 0.05)  # of this mean and a deviation of 1

    def found(seeds):
        chance = random.Random(2)
        studies = [compare(results(chance, seeds, [effect]), "lora", higher_is_better=True)[0] for _ in range(250)]
        return sum(each.verdict == "better" for each in studies) / 250

    assert found(seeds) >= 0.8 - 0.076
    assert found(seeds - 1) <= 0.8 + 0.076


def test_the_interval_covers():
    chance = random.Random(3)
    covered = 0
    for _ in range(1000):
        low, high = student_interval([chance.gauss(0.7, 2.0) for _ in range(4)])
        covered += low <= 0.7 <= high
    assert covered / 1000 == pytest.approx(0.95, abs=0.021)


def test_the_sign_follows_what_is_better():
    values = {"lora": {0: 1.0, 1: 1.1, 2: 0.9, 3: 1.0}, "other": {0: 0.5, 1: 0.61, 2: 0.4, 3: 0.52}}
    (loss,) = compare(values, "lora", higher_is_better=False)
    (accuracy,) = compare(values, "lora", higher_is_better=True)
    assert (loss.verdict, accuracy.verdict) == ("better", "worse")
    assert loss.difference == pytest.approx(-0.4925)
    assert "is better than lora" in sentence(loss, "test loss")


def test_only_seeds_that_both_have_are_paired():
    values = {"lora": {0: 1.0, 1: 2.0, 2: 3.0}, "other": {1: 2.5, 2: 3.4, 7: 100.0}}
    (each,) = compare(values, "lora", higher_is_better=True)
    assert (each.seeds, each.difference) == (2, pytest.approx(0.45))


def test_one_seed_says_nothing():
    (each,) = compare({"lora": {0: 1.0}, "other": {0: 9.0}}, "lora", higher_is_better=True)
    assert (each.verdict, each.interval, each.p) == ("one seed", None, None)
    assert "nothing follows" in sentence(each, "accuracy")


def test_equal_results_are_not_distinguishable_and_no_seeds_would_help():
    values = {"lora": {0: 1.0, 1: 2.0}, "same": {0: 1.0, 1: 2.0}}
    (each,) = compare(values, "lora", higher_is_better=True)
    assert (each.verdict, each.seeds_to_decide) == ("not distinguishable", None)
    assert "no practical number of seeds" in sentence(each, "accuracy")


@given(st.dictionaries(st.text(min_size=1), st.floats(0, 1), min_size=1, max_size=12))
def test_holm_is_between_the_p_value_and_bonferroni(p_values):
    adjusted = holm(p_values)
    assert adjusted.keys() == p_values.keys()
    for name, p in p_values.items():
        assert p - 1e-12 <= adjusted[name] <= min(1.0, len(p_values) * p) + 1e-12
    ordered = sorted(p_values, key=p_values.get)
    assert [adjusted[name] for name in ordered] == sorted(adjusted[name] for name in ordered)


def test_intervals_are_the_same_for_the_same_values():
    assert bootstrap_interval([1.0, 2.0, 4.0]) == bootstrap_interval([1.0, 2.0, 4.0])
