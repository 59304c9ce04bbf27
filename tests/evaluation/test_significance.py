"""The statistical tests have their stated error rates, and their sentences state the result."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nalora.evaluation.significance import (
    bootstrap_interval,
    compare_methods,
    deviation,
    holm,
    resolution,
    seeds_to_decide,
    student_interval,
)
from nalora.report.tables import Record, tabulate

METHODS = [f"method {i}" for i in range(10)]


def compare(values, baseline, **options):
    """Compare every other method with the baseline."""
    return compare_methods(values, [(method, baseline) for method in values if method != baseline], **options)


def results(chance, seeds, differences, noise=1.0):
    """Return results with a common term per seed, as runs that share data order and initialisation have."""
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


@pytest.mark.parametrize("accuracy", [0.01, 0.06, 0.3])
@pytest.mark.parametrize("questions", [100, 1319])
@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_equal_accuracies_are_called_different_at_most_as_often_as_stated(seeds, questions, accuracy):
    """As above where results are shares of few questions, and differences often the same number for every seed.

    Taken as certain, such differences are a false claim in 62 % of the studies of 2 seeds and 100 questions at an
    accuracy of 1 %, and in 18 % of those of 3 seeds.
    """
    studies, chance = 1000, torch.Generator().manual_seed(seeds)
    asked = torch.full((studies, 11, seeds), float(questions))
    shares = (torch.binomial(asked, torch.full_like(asked, accuracy), generator=chance).double() / questions).tolist()
    claims = 0
    for arms in shares:
        values = {f"arm {i}": dict(enumerate(by_seed)) for i, by_seed in enumerate(arms)}
        found = compare(values, "arm 0", higher_is_better=True)
        claims += any(each.verdict in ("better", "worse") for each in found)
    assert claims / studies <= 0.05 + 0.021


def test_differences_that_are_all_equal_are_as_uncertain_as_the_measure_is_coarse():
    values = {"lora": {0: 0.30, 1: 0.35, 2: 0.28}, "other": {0: 0.31, 1: 0.36, 2: 0.29}}
    (near,) = compare({**values, "finer": {0: 0.315}}, "lora", higher_is_better=True)[:1]
    low, high = near.interval
    # Half of one is Student's quantile of 2 degrees of freedom times 0.005 / √12 / √3.
    assert high - low == pytest.approx(2 * 4.3027 * 0.005 / 6, rel=1e-4)
    assert 0 < near.p < 1
    far = {"lora": values["lora"], "other": {seed: value + 0.2 for seed, value in values["lora"].items()}}
    (each,) = compare(far, "lora", higher_is_better=True)
    assert each.verdict == "better", "ten times what the measure can tell is seen"


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
def test_a_difference_is_found_as_often_as_the_power_predicts(effect):
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
    assert loss.sentence("test loss").startswith("other is better than lora: -0.4925 test loss, 95 % interval -0.5")


def test_only_seeds_that_both_have_are_paired():
    values = {"lora": {0: 1.0, 1: 2.0, 2: 3.0}, "other": {1: 2.5, 2: 3.4, 7: 100.0}}
    (each,) = compare(values, "lora", higher_is_better=True)
    assert (each.seeds, each.difference) == (2, pytest.approx(0.45))


def test_one_seed_decides_nothing():
    (each,) = compare({"lora": {0: 1.0}, "other": {0: 9.0}}, "lora", higher_is_better=True)
    assert (each.verdict, each.interval, each.p) == ("too few seeds", None, None)
    assert "which decides nothing" in each.sentence("accuracy")


def test_two_seeds_have_an_interval_and_no_verdict():
    values = {"lora": {0: 0.30, 1: 0.31}, "other": {0: 0.60, 1: 0.61}, "third": {0: 0.1, 1: 0.2, 2: 0.3}}
    each = compare(values, "lora", higher_is_better=True)[0]
    assert (each.verdict, each.seeds, each.p, each.adjusted_p) == ("too few seeds", 2, None, None)
    assert each.interval.low < each.difference < each.interval.high
    sentence = each.sentence("accuracy")
    assert "95 % interval" in sentence
    assert "over 2 seeds, which are too few for a decision" in sentence
    assert "better" not in sentence


def test_arms_with_too_few_seeds_do_not_weaken_other_claims():
    three = {"lora": {0: 1.0, 1: 1.1, 2: 0.9}, "other": {0: 0.5, 1: 0.61, 2: 0.39}}
    (alone,) = compare(three, "lora", higher_is_better=False)
    beside = compare({**three, "new": {0: 0.7, 1: 0.7}}, "lora", higher_is_better=False)[0]
    assert beside.adjusted_p == alone.adjusted_p == alone.p


def test_arms_without_a_common_seed_are_not_compared():
    (each,) = compare({"lora": {0: 1.0}, "other": {1: 9.0}}, "lora", higher_is_better=True)
    assert each.sentence("accuracy") == "other and lora have no seed in common: accuracy not compared."


def test_equal_results_are_not_distinguishable_and_no_seeds_would_help():
    values = {"lora": {0: 1.0, 1: 2.0, 2: 1.5}, "same": {0: 1.0, 1: 2.0, 2: 1.5}}
    (each,) = compare(values, "lora", higher_is_better=True)
    assert (each.verdict, each.p, each.adjusted_p, each.seeds_to_decide) == ("not distinguishable", 1.0, 1.0, None)
    assert "no practical number of seeds" in each.sentence("accuracy")


def test_no_fewer_seeds_than_a_verdict_needs_would_decide():
    assert seeds_to_decide([1.0, 1.0, 1.0001], 0.05) == 3


@pytest.mark.parametrize(("effect", "seeds"), [(0.03, 8723), (0.028, None)])
def test_up_to_ten_thousand_seeds_are_named(effect, seeds):
    half = math.sqrt(0.5)
    found = seeds_to_decide([effect - half, effect + half], 0.05)
    # About (1.96 + 0.84)² / effect², of which 0.028 needs 10,011.
    assert found == (seeds and pytest.approx(seeds, abs=10))


@given(st.dictionaries(st.text(min_size=1), st.floats(0, 1), min_size=1, max_size=12))
def test_holm_is_between_the_p_value_and_bonferroni(p_values):
    adjusted = holm(p_values)
    assert adjusted.keys() == p_values.keys()
    for name, p in p_values.items():
        assert p - 1e-12 <= adjusted[name] <= min(1.0, len(p_values) * p) + 1e-12
    ordered = sorted(p_values, key=p_values.get)
    assert [adjusted[name] for name in ordered] == sorted(adjusted[name] for name in ordered)


def test_intervals_are_the_same_for_the_same_values():
    first, second = (compare(results(random.Random(4), 4, [1.0]), "lora", higher_is_better=True) for _ in range(2))
    assert first == second
    assert first[0].numbers() == second[0].numbers()


@pytest.mark.parametrize(("seeds", "quantile"), [(2, 12.706205), (3, 4.302653), (5, 2.776445), (31, 2.042272)])
def test_students_quantiles_are_the_printed_table(seeds, quantile):
    values = [float(seed) for seed in range(seeds)]
    low, high = student_interval(values)
    assert (high - low) / 2 == pytest.approx(quantile * deviation(values) / math.sqrt(seeds), rel=1e-6)


def test_a_mark_in_a_table_is_the_verdict_of_the_comparisons():
    """Two seeds, or a p-value that Holm's correction raises above 5 %, are no verdict and no mark."""
    chance = random.Random(7)
    seen = set()
    for _ in range(150):
        values = results(chance, chance.choice([2, 3, 5]), [chance.choice([-8.0, -3.0]) for _ in range(3)])
        records = [Record(arm, seed, {"accuracy": v}) for arm, by_seed in values.items() for seed, v in by_seed.items()]
        verdicts = {each.verdict for each in compare(values, "lora", higher_is_better=True)}
        lora_is_marked = tabulate(records).rows["lora"][0].mark == "best"
        assert lora_is_marked == (verdicts == {"worse"})
        seen.add(lora_is_marked)
    assert seen == {True, False}


def test_equal_results_are_called_equal_and_not_zero_with_an_interval_of_zero():
    values = {"lora": dict.fromkeys(range(3), 0.52), "na-lora": dict.fromkeys(range(3), 0.52)}
    (comparison,) = compare(values, "lora", higher_is_better=True)
    assert comparison.sentence("accuracy") == "na-lora and lora have the same accuracy with every seed (3 seeds)."


def test_the_level_is_the_callers():
    values = {"lora": {0: 1.0, 1: 1.1, 2: 0.9}, "other": {0: 0.8, 1: 1.0, 2: 0.6}}
    (usual,) = compare(values, "lora", higher_is_better=False)
    (loose,) = compare(values, "lora", higher_is_better=False, alpha=0.5)
    assert (usual.verdict, loose.verdict) == ("not distinguishable", "better")
    assert loose.interval.high < usual.interval.high


def test_comparisons_that_were_planned_and_failed_count():
    values = {"lora": {0: 1.0, 1: 1.1, 2: 0.9}, "other": {0: 0.5, 1: 0.61, 2: 0.39}}
    (alone,) = compare_methods(values, [("other", "lora")], higher_is_better=False)
    (planned,) = compare_methods(values, [("other", "lora")], higher_is_better=False, planned=5)
    assert planned.adjusted_p == pytest.approx(5 * alone.adjusted_p)


def test_the_finest_step_is_the_smallest_difference_above_rounding():
    assert resolution({}) == resolution({"lora": {}}) == resolution({"lora": {0: 0.7, 1: 0.7}}) == 0.0
    assert resolution({"lora": {0: 0.5, 1: 0.75}, "other": {0: 0.625}}) == 0.125
    assert resolution({"lora": {0: 1e10, 1: 1e10 + 1, 2: 1e10 + 100}}) == 99.0


def test_equal_differences_are_as_uncertain_as_the_finest_step():
    assert deviation([1.0, 3.0], finest=100.0) == pytest.approx(math.sqrt(2))
    assert deviation([0.5, 0.5, 0.5]) == 0.0
    assert deviation([0.0, 0.0], finest=1.0) == deviation([0.5, 0.5], finest=1.0) == pytest.approx(1 / math.sqrt(12))


def test_a_bootstrap_needs_two_seeds_as_an_interval_does():
    one, two = {"lora": {0: 1.0}, "other": {0: 0.5}}, {"lora": {0: 1.0, 1: 1.1}, "other": {0: 0.5, 1: 0.4}}
    (alone,), (both,) = (compare(values, "lora", higher_is_better=False) for values in (one, two))
    assert alone.bootstrap is None
    assert (both.bootstrap.low, both.bootstrap.high) == pytest.approx((-0.7, -0.5))


def test_the_level_itself_still_decides():
    values = {"lora": {0: 1.0, 1: 1.1, 2: 0.9}, "other": {0: 0.8, 1: 1.0, 2: 0.6}}
    (found,) = compare(values, "lora", higher_is_better=False)
    (decided,) = compare(values, "lora", higher_is_better=False, alpha=found.adjusted_p)
    assert decided.verdict == "better"


def test_a_comparison_names_what_was_compared_and_how_many_seeds_would_decide_it():
    values = {
        "lora": {0: 1.0, 1: 1.1, 2: 0.9},
        "near": {0: 0.9, 1: 1.1, 2: 0.7},
        "far": {0: 0.5, 1: 0.61, 2: 0.39},
    }
    near, far = compare(values, "lora", higher_is_better=False)
    assert [(each.method, each.baseline, each.seeds) for each in (near, far)] == [
        ("near", "lora", 3),
        ("far", "lora", 3),
    ]
    differences = [-0.1, 0.0, -0.2]
    assert near.difference == pytest.approx(-0.1)
    assert near.interval == pytest.approx(student_interval(differences))
    assert near.bootstrap == pytest.approx(bootstrap_interval(differences))
    assert (near.verdict, far.verdict) == ("not distinguishable", "better")
    assert near.seeds_to_decide == seeds_to_decide(differences, 0.05 / 2, resolution(values)) > 3
    assert far.seeds_to_decide is None


def test_equal_differences_need_the_finest_step_for_seeds_to_decide():
    values = {
        "lora": {0: 0.50, 1: 0.51, 2: 0.52},
        "other": {0: 0.51, 1: 0.52, 2: 0.53},
        "third": {0: 0.6, 1: 0.1, 2: 0.9},
    }
    other = compare(values, "lora", higher_is_better=True, alpha=1e-4)[0]
    assert other.verdict == "not distinguishable"
    assert other.seeds_to_decide == seeds_to_decide([0.01] * 3, 1e-4 / 2, 0.01) > 3


def test_intervals_of_equal_values_have_no_width_and_are_drawn_with_seed_0():
    assert student_interval([1.0, 1.0]) == (1.0, 1.0)
    values = [math.sqrt(number) for number in range(9)]
    assert bootstrap_interval(values) == pytest.approx((1.206229, 2.293530), abs=1e-6)


@pytest.mark.parametrize(("effect", "seeds"), [(2.5, 4), (1.0, 10), (0.8, 15), (0.5, 34)])
def test_seeds_to_decide_are_those_of_the_tables_of_the_paired_t_test(effect, seeds):
    """A power of 0.8 at a level of 5 % for a difference of so many standard deviations."""
    half = math.sqrt(0.5)
    differences = [effect - half, effect + half]
    assert seeds_to_decide(differences, 0.05) == seeds
    assert seeds_to_decide(differences, 0.01) > seeds


def test_differences_without_any_spread_need_the_fewest_seeds():
    assert seeds_to_decide([1.0, 1.0, 1.0], 0.05) == 3
    assert seeds_to_decide([1.0, 1.0, 1.0], 0.05, finest=10.0) > 10


@pytest.mark.parametrize("differences", [[-0.1, 0.02, -0.2], [0.3, 0.1, 0.25, 0.7], [1.0, -1.0, 0.5, 0.1, 0.2]])
def test_the_p_value_is_that_of_scipys_paired_t_test(differences):
    stats = pytest.importorskip("scipy.stats")
    values = {
        "lora": dict.fromkeys(range(len(differences)), 1.0),
        "other": {s: 1 + d for s, d in enumerate(differences)},
    }
    (found,) = compare(values, "lora", higher_is_better=True)
    one, two = ([values[name][seed] for seed in range(len(differences))] for name in ("other", "lora"))
    assert found.p == pytest.approx(stats.ttest_rel(one, two).pvalue, rel=1e-9)


def test_holm_takes_the_smallest_p_value_first_whatever_its_name():
    assert holm({"a": 0.04, "b": 0.01, "c": 0.03}) == pytest.approx({"b": 0.03, "c": 0.06, "a": 0.06})


def test_sentences_name_a_worse_method_and_the_seeds_that_would_decide():
    values = {"lora": {0: 1.0, 1: 1.1, 2: 0.9}, "far": {0: 1.5, 1: 1.61, 2: 1.39}, "near": {0: 0.9, 1: 1.1, 2: 0.7}}
    far, near = compare(values, "lora", higher_is_better=False)
    assert "far is worse than lora" in far.sentence("test loss")
    assert f"about {near.seeds_to_decide} seeds would decide" in near.sentence("test loss")


def test_bootstrap_draws_do_not_depend_on_other_draws():
    values = [math.sqrt(number) for number in range(9)]
    first = bootstrap_interval(values)
    torch.rand(1)
    assert bootstrap_interval(values) == first


def test_a_small_difference_without_spread_is_certain_unless_the_measure_is_coarse():
    assert seeds_to_decide([0.1, 0.1, 0.1], 0.05) == 3
    assert seeds_to_decide([0.1, 0.1, 0.1], 0.05, finest=1.0) > 3
