"""Every rule picks what its definition says on curves whose best rate is known, and pays for every step it sees."""

from __future__ import annotations

import math

import pytest
from curves import GATE_MEASURES, GRID, RANGE_STEPS, STEPS, case
from hypothesis import given
from hypothesis import strategies as st

import nalora
from nalora.studies.rate_rules import (
    FAMILIES,
    GATES,
    LARGEST_REGRET,
    PLANS,
    Case,
    Rule,
    crossing,
    fit,
    mean_regret,
    nearest,
    smoothed,
)

grid_places = st.integers(0, len(GRID) - 1)
TARGETS = [*((GATES, name) for name in GATE_MEASURES), ("update to weight", "update_to_weight"),
           ("gradient norm", "rate_times_gradient"), ("gradient norm", "gradient_growth")]  # fmt: skip


@pytest.mark.parametrize(("family", "measure"), TARGETS)
@given(place=grid_places)
def test_a_target_is_reached_at_the_rate_where_the_measure_has_that_value(family, measure, place):
    rule = Rule(family, measure, 30, 1, 0.1)
    assert rule.pick(case(best=GRID[place], moving=[measure])) == GRID[place]


@given(place=st.integers(0, 8))
def test_a_target_between_two_probed_rates_is_found_with_every_second_rate(place):
    """The ninth rate is the highest one that is probed."""
    assert Rule(GATES, "flip", 60, 2, 0.1).pick(case(best=GRID[place], moving=["flip"])) == GRID[place]


@given(place=grid_places, shift=st.integers(-2, 2))
def test_the_training_loss_rule_takes_the_lowest_loss_and_its_shift(place, shift):
    """The early loss prefers a rate `shift` octaves above the best one; the rule's number is in half octaves."""
    if 0 <= place + 2 * shift < len(GRID):
        found = Rule("training loss", "loss", 30, 1, -2 * shift).pick(case(best=GRID[place], shift=shift))
        assert found == GRID[place]


def test_the_training_loss_of_the_plan_is_the_one_after_its_steps():
    early = {rate: {"loss@30": -rate, "loss@60": rate} for rate in GRID}
    of_two_lengths = Case("both", STEPS, dict.fromkeys(GRID, 1.0), early)
    assert Rule("training loss", "loss", 30, 1, 0).pick(of_two_lengths) == GRID[-1]
    assert Rule("training loss", "loss", 60, 1, 0).pick(of_two_lengths) == GRID[0]
    assert Rule("training loss", "loss", 30, 2, 0).pick(of_two_lengths) == GRID[8], "the last one that was probed"


def valley(lowest, steepest):
    """A range test whose loss falls from 3 to 1 at one rate, slowly on to its lowest point, and rises after it."""
    rates = [1e-4 * 1000 ** (index / (RANGE_STEPS - 1)) for index in range(RANGE_STEPS)]
    fall = [3 - 2 / (1 + (steepest / rate) ** 8) - 0.1 * math.log(rate / rates[0]) for rate in rates]
    rise = [5 * max(math.log(rate / lowest), 0) for rate in rates]
    return [(rate, down + up) for rate, down, up in zip(rates, fall, rise, strict=True)]


def test_a_range_test_is_read_at_its_lowest_and_at_its_steepest_point():
    tested = Case("range", STEPS, dict.fromkeys(GRID, 1.0), {}, valley(lowest=1.6e-2, steepest=1.41e-3))
    lowest, steepest = (Rule("range test", name, 0, 1, 0).pick(tested) for name in ("range_minimum", "range_steepest"))
    # Averaging over about ten of 300 steps moves both points by a third of an octave at most.
    assert lowest in GRID[7:10]
    assert steepest in GRID[1:3]
    two_octaves_below = Rule("range test", "range_minimum", 0, 1, -4).pick(tested)
    assert GRID.index(two_octaves_below) == GRID.index(lowest) - 4


def test_a_range_test_ends_where_it_diverged():
    """The values after a loss that is not finite are not seen, however low they are."""
    curve = valley(lowest=1.6e-2, steepest=1.41e-3)
    broken = [*curve[:150], (curve[150][0], math.nan), *((rate, 0.0) for rate, _ in curve[151:])]
    assert [rate for rate, _ in smoothed(broken)] == [rate for rate, _ in curve[:150]]


@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=50))
def test_smoothing_keeps_the_range_and_starts_without_bias(losses):
    values = [loss for _, loss in smoothed([(1.0, loss) for loss in losses])]
    assert values[0] == pytest.approx(losses[0])
    assert all(min(losses) - 1e-9 <= value <= max(losses) + 1e-9 for value in values)


def test_the_same_rate_is_the_same_rate():
    assert Rule("same rate", "fixed", 0, 1, 4.2e-3).pick(case(best=GRID[0])) == nearest(GRID, 4e-3)


@given(st.lists(st.floats(1e-6, 1e3), min_size=2, max_size=10), st.floats(1e-6, 1e3))
def test_a_crossing_is_the_first_one_and_within_the_grid(measured, target):
    values = dict(zip(GRID, measured, strict=False))
    rate = crossing(values, target)
    assert min(values) * (1 - 1e-9) <= rate <= max(values) * (1 + 1e-9)
    reached = [place for place, value in values.items() if value >= target]
    if not reached:
        assert rate == pytest.approx(max(values))
    else:
        below = [place for place in values if place < reached[0]]
        assert (below[-1] if below else reached[0]) * (1 - 1e-9) <= rate <= reached[0] * (1 + 1e-9)


@given(factor=st.floats(0.5, 2), place=grid_places)
def test_the_nearest_rate_is_nearest_in_octaves(factor, place):
    found = nearest(GRID, GRID[place] * factor)
    assert abs(math.log(found / (GRID[place] * factor))) <= min(
        abs(math.log(rate / (GRID[place] * factor))) + 1e-12 for rate in GRID
    )


@pytest.mark.parametrize("measure", GATE_MEASURES)
def test_a_fit_finds_the_measure_that_follows_the_best_rate_and_its_value(measure):
    cases = [case(f"case {place}", GRID[place], moving=[measure]) for place in (2, 5, 7)]
    rule = fit(GATES, cases)
    assert (rule.family, rule.measure) == (GATES, measure)
    assert mean_regret(rule, cases) == 0
    # Targets within a quarter of an octave pick the same rate; the middle of them is the value itself.
    assert rule.number == pytest.approx(0.1, rel=0.1)
    assert rule.pick(case("unseen", GRID[3], moving=[measure])) == GRID[3]


@given(shift=st.sampled_from([-1.0, -0.5, 0.0, 0.5, 1.0]))
def test_the_fitted_shift_of_losses_and_range_tests_undoes_theirs(shift):
    cases = [case(f"case {place}", GRID[place], shift=shift) for place in (3, 5, 6)]
    for family in ("training loss", "range test"):
        rule = fit(family, cases)
        assert mean_regret(rule, cases) == 0, family
        assert rule.pick(case("unseen", GRID[4], shift=shift)) == GRID[4]
    assert fit("training loss", cases).number == -2 * shift


def test_the_fitted_rate_is_the_one_with_the_lowest_mean_regret():
    cases = [case("one", GRID[2]), case("two", GRID[4]), case("three", GRID[6])]
    assert fit("same rate", cases).number == GRID[4]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_fitted_by_the_same_criterion(family):
    """No rule of the family with one of the numbers tried is better on the cases than the fitted one."""
    cases = [case(f"case {place}", GRID[place], moving=["severe"], shift=0.5) for place in (1, 4, 8)]
    rule = fit(family, cases)
    for measure in FAMILIES[family]:
        for number in (0.02, 0.05, 0.1, 0.2) if family not in ("training loss", "range test") else range(-4, 5):
            steps, stride = (rule.steps, rule.stride)
            if rule.steps == 0 or f"{measure}@{steps}" in cases[0].early[GRID[0]]:
                other = Rule(family, measure, steps, stride, number)
                assert mean_regret(rule, cases) <= mean_regret(other, cases) + 1e-12


@pytest.mark.parametrize("plan", PLANS)
def test_short_runs_and_the_range_test_cost_the_same(plan):
    steps, stride = plan
    one = case()
    expected = 300 / (STEPS * len(GRID))
    for family, measure in [*TARGETS, ("training loss", "loss")]:
        assert Rule(family, measure, steps, stride, 1).cost(one) == pytest.approx(expected)
    assert Rule("range test", "range_minimum", 0, 1, 0).cost(one) == pytest.approx(expected)
    assert Rule("same rate", "fixed", 0, 1, 4e-3).cost(one) == 0
    assert expected <= 0.15


def test_the_cost_of_a_case_is_relative_to_its_own_grid():
    rule = Rule(GATES, "flip", 30, 1, 0.1)
    assert rule.cost(case(steps=438)) == pytest.approx(rule.cost(case(steps=219)) / 2)


def test_a_diverged_rate_costs_the_largest_regret_and_no_more():
    one = Case("one", STEPS, {1e-3: 0.6, 2e-3: math.inf, 4e-3: 0.62}, {})
    assert (one.regret(1e-3), one.regret(2e-3), one.regret(4e-3)) == (0, LARGEST_REGRET, pytest.approx(0.02))


def test_a_run_that_diverged_early_is_left_out_of_the_search():
    whole = case(best=GRID[4], moving=["flip"])
    early = {rate: values for rate, values in whole.early.items() if rate <= GRID[6]}
    assert Rule(GATES, "flip", 30, 1, 0.1).pick(Case("one", STEPS, whole.losses, early)) == GRID[4]
    assert Rule(GATES, "flip", 30, 1, 100).pick(Case("one", STEPS, whole.losses, early)) == GRID[6]


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "same rate"])
def test_what_was_not_recorded_is_named(family):
    bare = Case("bare", STEPS, dict.fromkeys(GRID, 1.0), {})
    with pytest.raises(nalora.NALoRAError, match=f"rules of '{family}': found no measure that all cases have"):
        fit(family, [bare])
    with pytest.raises(nalora.NALoRAError, match=r"bare: found (no run with|a range test of 0 steps)"):
        Rule(family, FAMILIES[family][0], 30, 1, 1).pick(bare)
