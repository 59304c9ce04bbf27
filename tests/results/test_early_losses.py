"""What is published about early losses follows from the cases: how far the pick is from the best, on either side."""

from __future__ import annotations

import importlib
import math

import pytest

from nalora.studies.rate_rules import Case

RATES = (0.001, 0.002, 0.004, 0.008)


def script():
    return importlib.import_module("findings_page.early_losses")


def case(best, lowest_early, rates=RATES):
    """A case with the lowest final loss at one rate, 0.01 more for each octave from it; the same for early losses."""

    def losses(centre):
        return {rate: 1 + 0.01 * abs(math.log2(rate / centre)) for rate in rates}

    early = {
        rate: {f"{name}@{steps}": value for name in ("loss", "rate_times_gradient") for steps in (30, 60)}
        for rate, value in losses(lowest_early).items()
    }
    return Case("a case", 200, losses(best), early)


def test_a_pick_below_the_best_is_counted_there_and_a_shift_repairs_it():
    low, right = case(best=0.004, lowest_early=0.002), case(best=0.004, lowest_early=0.004)
    high = case(best=0.004, lowest_early=0.008)
    row = script().shifts_table({"task": [low, low, right, high]})[-1]
    # Own pick: three of four are an octave off. An octave above: the first two are right, the others 0.01 off.
    assert row == "| task | 4 | 2, 1, 1 | 0.0075 (1 of 4) |  | 0.0050 (2 of 4) |"


def test_grids_half_an_octave_apart_have_all_shifts():
    rates = [0.001 * 2 ** (step / 2) for step in range(6)]
    row = script().shifts_table({"task": [case(rates[3], rates[2], rates)]})[-1]
    assert row == "| task | 1 | 1, 0, 0 | 0.0050 (0 of 1) | 0.0000 (1 of 1) | 0.0050 (0 of 1) |"


def test_a_rule_that_fits_one_task_is_judged_on_the_other():
    shifted, unshifted = [case(0.004, 0.002)] * 2, [case(0.004, 0.004)] * 2
    rows = script().transfer_table({"first": shifted, "second": unshifted})
    by_loss = next(row for row in rows if row.startswith("| training loss"))
    assert by_loss == "| training loss | 0.0000 (2 of 2) | 0.0100 (0 of 2) | 0.0000 (2 of 2) | 0.0100 (0 of 2) |"
    assert "4 grids in all" in rows[-1]


@pytest.mark.parametrize(
    ("rates", "octaves", "expected"),
    [(RATES, 1.0, True), (RATES, 0.5, False), ((0.001, 0.003, 0.009), 1.0, False), ((0.001, 0.002), 1.0, False)],
)
def test_only_grids_with_the_studys_distance_are_used(rates, octaves, expected):
    assert script().is_grid(case(rates[0], rates[0], rates), octaves) is expected


def test_a_grid_without_early_losses_is_left_out():
    known = case(0.004, 0.004)
    without = Case(known.name, known.steps, known.losses, {**known.early, RATES[0]: {}})
    assert not script().is_grid(without, 1.0)
