"""The rates that the page names follow from the grids, and the seeds from the spread of differences."""

from __future__ import annotations

import importlib
import math

import pytest


def script(name):
    return importlib.import_module(name)


def grid(losses, arm="lora", title="task"):
    return script("choosing_page.rate_losses").Grid(title, arm, losses, 1)


A = {0.001: 1.5, 0.002: 1.0, 0.004: 1.01, 0.008: math.inf}
B = {0.002: 1.2, 0.004: 1.02, 0.008: 1.0}


def test_losses_are_found_at_their_distance_from_the_best_rate():
    one = grid(A)
    assert one.best == 0.002
    assert [one.at(octaves) for octaves in (-1, 1, 2, 0.5, -2)] == [0.5, pytest.approx(0.01), math.inf, None, None]
    half = grid({0.004: 1.3, 0.00566: 1.0, 0.008: 1.1})  # rates with three digits
    assert half.at(-0.5) == pytest.approx(0.3)
    assert half.at(0.5) == pytest.approx(0.1)


def test_the_first_rate_is_the_one_that_is_never_far_from_the_best():
    rate, rise = script("choosing_page.rate_losses").start_rate([grid(A), grid(B)])
    assert (rate, rise) == (0.004, pytest.approx(0.02))  # 0.002 is best once and 0.2 worse the other time
    assert script("choosing_page.rate_losses").start_rate([grid(A), grid({0.1: 1.0, 0.2: 2.0})]) is None


def test_the_search_reaches_from_the_lowest_to_the_highest_best_rate():
    assert script("choosing_page.rate_losses").rates_to_try([grid(A), grid(B)]) == [
        0.002,
        0.00283,
        0.004,
        0.00566,
        0.008,
    ]
    assert script("choosing_page.rate_losses").rates_to_try([grid(A)]) == [0.002]


def test_both_sides_of_the_best_rate_are_counted():
    lines = script("choosing_page.rate_losses").sides([grid(A), grid({0.001: 1.2, 0.002: 1.0, 0.004: 1.1})])
    octave = next(line for line in lines if line.startswith("- **An octave**"))
    assert "+0.3500 below it (median of 2 grids), +0.0550 above it (median of 2 grids)" in octave
    assert "in 0 of the 2 grids with both" in octave
    assert "not tried below it, +inf above it (median of 1 grid; training failed in 1)" in lines[1]
    assert lines[-1].endswith("do not go far above it.")
    assert "far above" not in script("choosing_page.rate_losses").sides([grid(B)])[-1]


def test_full_fine_tunings_rate_is_compared_on_the_same_task():
    rows = [grid(A), grid({0.0001: 1.0, 0.0002: 1.5}, "full fine-tuning"), grid(B, title="other")]
    (text,) = script("choosing_page.rate_losses").best_rates(rows)
    assert text.startswith("LoRA's best rate was 0.002 to 0.008, ")
    assert "full fine-tuning's was 0.05 to 0.05 of LoRA's" in text
    table = script("choosing_page.rate_losses").rate_table(rows)
    assert table[2] == "| task: lora | 1 | 0.002 | 1.00 |  | +0.5000 |  |  | +0.0100 | diverged |"


def test_a_grid_with_a_rate_that_is_not_trained_is_left_out():
    part = {"validation_losses": {"lora": {"0.001": 1.0, "0.002": "diverged"}, "full": {"0.001": 1.0, "0.002": None},
                                  "lost": {"0.001": 1.0, "0.002": "missing"}}}  # fmt: skip
    (one,) = script("choosing_page.rate_losses").grids_of(part, "task", 1)
    assert (one.arm, one.losses) == ("lora", {0.001: 1.0, 0.002: math.inf})


def test_a_variants_rates_are_moved_by_half_octaves():
    """Its best rate in the study of methods is 1.9965 times LoRA's there: an octave."""
    choice, recommendation = script("choosing_page.method_choice"), script("choosing_page.recommendation")
    state = script("tables.arm_states").State("a", 3, 3, 0.0113, 1.0, None, None)
    of_lora = [grid({0.004: 1.1, 0.00566: 1.0}, title=script("choosing_page.rate_losses").GRIDS["equal-cost"])]
    lora = choice.Choice("lora", None, False)
    start = recommendation.Start(lora, None, {}, of_lora, 0.004, 0.1, [0.002, 0.00283, 0.004])
    assert start.rates_of(choice.Choice("a", state, False), start.rates) == [0.004, 0.00566, 0.008]
    assert start.searched == [0.002, 0.00283, 0.004]
    assert start.first_rate == 0.004


def test_larger_differences_and_less_noise_need_fewer_seeds():
    needed = script("choosing_page.seeds_needed").needed
    quiet, loud = ([noise * (-1) ** seed + 5 for seed in range(10)] for noise in (0.001, 0.01))
    assert needed({"a": quiet}, 0.01) <= 4 < needed({"a": loud}, 0.01) < needed({"a": loud}, 0.005)
    # Student's test for a difference of one standard deviation at a power of 80 %.
    spread = 0.01 * math.sqrt(10 / 9)
    assert needed({"a": loud}, spread) == 10
    assert needed({"a": loud, "b": quiet, "c": quiet}, 0.01) == needed({"a": quiet}, 0.01), "the median of the arms"
    assert script("choosing_page.seeds_needed").shown(math.inf) == "> 10,000"
    assert script("choosing_page.seeds_needed").shown(3.5) == "4"
