"""Measures of the first steps are those of the steps, however often a run logs."""

from __future__ import annotations

import statistics

import pytest

from nalora.studies.rate_cases import early_measures


def rows(every):
    """A log with falling losses and growing norms; a row has the mean loss since the row before."""
    steps = [1, *range(every, 61, every)] if every > 1 else range(1, 61)
    found, before = [], 0
    for step in steps:
        loss = statistics.fmean(2 - 0.01 * each for each in range(before + 1, step + 1))
        found.append({"step": step, "loss": loss, "grad_norm": 1 + 0.1 * step, "learning_rate": 0.01})
        before = step
    return found


@pytest.mark.parametrize("steps", [30, 60])
def test_the_loss_of_the_last_ten_steps_does_not_depend_on_how_often_a_run_logs(steps):
    name = f"loss@{steps}"
    assert early_measures(rows(10), steps)[name] == pytest.approx(early_measures(rows(1), steps)[name])
    assert early_measures(rows(1), steps)[name] == pytest.approx(2 - 0.01 * (steps - 4.5))


def test_gradient_norms_are_medians_over_ten_steps():
    measures = early_measures(rows(1), 30)
    last, first = 1 + 0.1 * 25.5, 1 + 0.1 * 5.5
    assert measures["rate_times_gradient@30"] == pytest.approx(0.01 * last)
    assert measures["gradient_growth@30"] == pytest.approx(last / first)


def test_a_log_without_the_step_has_no_measures():
    assert early_measures(rows(20), 30) == {}
    assert early_measures([], 30) == {}
