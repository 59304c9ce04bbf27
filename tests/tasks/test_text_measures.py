"""Measures of answers: known values, and what holds for any texts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nalora.tasks.text_measures import MEASURES, matching, suitable


@pytest.mark.parametrize(
    ("measure", "output", "expected", "score"),
    [
        ("exact_match", "The  Eiffel tower!", "eiffel Tower", 1),
        ("exact_match", "Eiffel", "Eiffel tower", 0),
        ("f1", "the big dog", "a dog barks", 0.5),
        ("f1", "", "dog", 0),
        ("contains", "It is Paris, France.", "paris", 1),
        ("contains", "Parisian", "paris", 0),
        ("number", "3 + 4 = 7, so the answer is 7.0", "#### 7", 1),
        ("number", "8", "7", 0),
        ("choice", "B) because", "b", 1),
        ("choice", "The answer is (C).", "C", 1),
        ("choice", "A", "B", 0),
        ("choice", "blue", "Blue.", 1),
    ],
)
def test_known_scores(measure, output, expected, score):
    assert MEASURES[measure](output, expected) == score


@given(st.sampled_from(sorted(MEASURES)), st.text(max_size=40), st.text(max_size=40))
def test_scores_are_between_0_and_1(measure, output, expected):
    assert 0 <= MEASURES[measure](output, expected) <= 1


@given(st.sampled_from(["exact_match", "f1", "contains", "choice"]), st.text(max_size=40))
def test_the_expected_answer_itself_has_the_full_score(measure, text):
    assert MEASURES[measure](text, text) == 1


@given(st.text(max_size=40), st.text(max_size=40))
def test_f1_is_symmetric_and_1_for_exact_matches(one, other):
    assert MEASURES["f1"](one, other) == MEASURES["f1"](other, one)
    assert MEASURES["f1"](one, other) >= MEASURES["exact_match"](one, other)


def test_regular_expressions_compare_their_last_match():
    label = matching(r"label: (\w+)")
    assert label("label: no\nlabel: Yes", "label: yes") == 1
    assert label("yes", "label: yes") == 0
    assert label("label: no", "label: yes") == 0
    assert matching(r"\d{4}")("in 1999", "any year") == 1


@pytest.mark.parametrize(
    ("expected", "measures"),
    [
        (["12", "$3.50", "1/2", "so\n#### 4"], ("number",)),
        (["A", "(b)", "C."], ("choice",)),
        (["Paris", "New York"], ("exact_match", "f1")),
        (["word " * 50], ("f1",)),
    ],
)
def test_suitable_measures_follow_the_expected_answers(expected, measures):
    assert suitable(expected) == measures
