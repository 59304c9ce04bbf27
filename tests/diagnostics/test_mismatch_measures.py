"""Rank correlation and top overlap against their plain formulas."""

from __future__ import annotations

import itertools

import pytest
import torch

from nalora.diagnostics.mismatch_measures import held_by_top, rank_correlation, top_overlap


def plain_ranks(values):
    """The mean of the places that a value takes among the sorted ones, counted by hand."""
    ordered = sorted(values)
    return [sum(i + 1 for i, v in enumerate(ordered) if v == x) / ordered.count(x) for x in values]


def plain_spearman(one, other):
    a, b = plain_ranks(one), plain_ranks(other)
    mean = (len(a) + 1) / 2
    top = sum((x - mean) * (y - mean) for x, y in zip(a, b, strict=True))
    return top / (sum((x - mean) ** 2 for x in a) * sum((y - mean) ** 2 for y in b)) ** 0.5


def test_perfect_and_reversed_orders():
    x = torch.randn(101)
    assert rank_correlation(x, x.exp()) == pytest.approx(1, abs=1e-12)
    assert rank_correlation(x, -x.exp()) == pytest.approx(-1, abs=1e-12)


@pytest.mark.parametrize("levels", [2, 5, 1000])
def test_the_plain_formula_with_ties(levels):
    generator = torch.Generator().manual_seed(levels)
    one, other = (torch.randint(levels, (60,), generator=generator).double() for _ in range(2))
    other = other + one.sqrt().round()
    assert rank_correlation(one, other) == pytest.approx(plain_spearman(one.tolist(), other.tolist()), abs=1e-12)


@pytest.mark.parametrize("broken", [torch.zeros(10), torch.full((10,), float("nan"))])
def test_without_an_order_there_is_no_answer(broken):
    x = torch.arange(10.0)
    for pair in ((x, broken), (broken, x)):
        assert rank_correlation(*pair) is None
        assert top_overlap(*pair, 0.3) is None
        assert held_by_top(*pair, 0.3) is None


def test_overlap_of_the_top():
    x = torch.arange(10.0)
    assert top_overlap(x, x * 2, 0.3) == 1
    assert top_overlap(x, -x, 0.3) == 0
    assert top_overlap(x, torch.tensor([0.0, 0, 0, 0, 0, 0, 9, 0.5, 8, 7]), 0.3) == pytest.approx(2 / 3)


def test_channels_that_tie_for_the_last_place_share_it():
    x, tied = torch.arange(6.0), torch.tensor([0.0, 0, 1, 1, 1, 2])
    # The top half of `tied` is channel 5 and two of 2, 3, 4: the mean over the three ways to choose them.
    by_hand = sum(len({5, *pair} & {3, 4, 5}) / 3 for pair in itertools.combinations((2, 3, 4), 2)) / 3
    assert top_overlap(x, tied, 0.5) == pytest.approx(by_hand)


def test_what_the_top_holds():
    amounts = torch.tensor([1.0, 2, 3, 4])
    assert held_by_top(amounts, amounts, 0.5) == pytest.approx(0.7)
    assert held_by_top(-amounts, amounts, 0.5) == pytest.approx(0.3)
