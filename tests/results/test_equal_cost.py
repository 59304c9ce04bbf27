"""What the findings say of the study equal-cost, as more of its runs are finished."""

from __future__ import annotations

import importlib

import pytest


@pytest.fixture
def page():
    return importlib.import_module("findings_page.equal_cost")


@pytest.fixture
def state():
    """An arm with a share of the gap; without one it is not finished."""
    kind = importlib.import_module("tables.arm_states").State

    def made(arm, share=None, seeds=3):
        row = None if share is None else {"verdict": "better", "difference": -share, "interval": [-1, 0]}
        return kind(arm, seeds, 3, 0.1, 0.6, row, share)

    return made


def test_unfinished_arms_are_named(page, state):
    arms = [state("lora"), state("wide", 0.4), state("slow", seeds=2)]
    assert page.completeness(arms) == (
        "**Not finished:** 2 of 3 arms have all of their seeds. Without a verdict: slow (2 of 3)."
    )
    assert page.completeness(arms[:2]) == "All 2 arms have all of their seeds."


def test_the_claim_holds_for_half_of_the_gap_on_both_tasks(page, state):
    here = [state("lora"), state("full fine-tuning", 1.0), state("both", 0.5), state("one", 0.7), state("open")]
    assert page.claim(here, []).startswith("No arm has been judged on a second task")
    assert page.claim(here, [state("lora"), state("both")]).startswith("No arm has been judged")
    there = [state("lora"), state("full fine-tuning", 1.0), state("both", 0.6), state("one", 0.49), state("open", 0.9)]
    sentence = page.claim(here, there)
    assert "both (50 % here, 60 % there: the claim holds)" in sentence
    assert "one (70 % here, 49 % there: it does not hold)" in sentence
    assert "open (not finished here, 90 % there: it does not hold)" in sentence
    assert "full fine-tuning" not in sentence
