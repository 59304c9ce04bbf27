"""Counts of a rule's picks, and the sentences that are made of them."""

from __future__ import annotations

import pytest

from nalora.studies.rate_evidence import RULE, Counts, Evidence, counts, known
from nalora.studies.rate_rules import Case

RATES = (1e-3, 2e-3, 4e-3)


def case(early, final):
    """A case with these losses after 30 steps and at the end, by rate."""
    return Case(
        "a case", 200, dict(zip(RATES, final, strict=True)),
        {rate: {"loss@30": loss} for rate, loss in zip(RATES, early, strict=True)},
    )  # fmt: skip


def test_picks_are_counted_on_either_side_of_the_best():
    below = case((2.0, 2.1, 2.2), (1.03, 1.01, 1.02))  # picks the lowest rate; the next one is better
    at = case((2.1, 2.0, 2.2), (1.03, 1.01, 1.02))  # the next one is worse
    above = case((2.2, 2.1, 2.0), (1.03, 1.01, 1.02))  # there is no next one
    found = counts(RULE, [below, at, above])
    assert found == Counts(
        3, 1, 1, 1, lowest=1, loss_above_best=pytest.approx(0.01), next_grids=2, next_better=1, next_gap=0.05
    )


def test_tasks_are_added_up_and_means_are_weighted():
    one, other = Counts(3, 2, 1, 0, 1, 0.02, 3, 2, 0.1), Counts(1, 0, 1, 0, 0, 0.0, 1, 0, 0.0)
    evidence = Evidence(RULE, {"a": one, "b": other}, "m", 135_000_000, (210,))
    assert evidence.total == Counts(4, 2, 2, 0, 1, pytest.approx(0.015), 4, 2, 0.1)
    first, lowest, limits = evidence.sentences()
    assert first == (
        "In 4 grids on 2 tasks (a and b) such a pick was never above the best rate, 2 times at it and 2 times below it;"
        " on average its final loss was 0.0150 above the best of the grid."
    )
    assert lowest.startswith("In 1 of these grids it was the lowest rate of the grid")
    assert "has not been judged on any other task" in limits
    assert "one model (m, 135M parameters), with runs of 210 steps" in limits
    next_rate = "the rate an octave above the pick was better in 2 of 3 grids on a and in 0 of 1 grid on b"
    assert evidence.on_the_next_rate() == next_rate


def test_the_evidence_that_comes_with_nalora_is_about_the_rule():
    assert known().rule == RULE
    assert known().total.grids == sum(task.below + task.at + task.above for task in known().tasks.values()) > 0
