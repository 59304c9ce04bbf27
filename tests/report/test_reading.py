"""Files of a run that are damaged, truncated or of another shape become notices, never errors."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from nalora.report import reading

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


def test_a_missing_file_is_silent_and_a_damaged_one_is_reported(tmp_path):
    notices: list[str] = []
    assert reading.read_object(tmp_path / "result.json", notices) is None
    assert notices == []
    (tmp_path / "result.json").write_text('{"steps": 3')
    assert reading.read_object(tmp_path / "result.json", notices) is None
    assert notices == ["result.json is damaged and was left out."]


def test_an_object_without_the_needed_keys_is_reported(tmp_path):
    (tmp_path / "diagnosis.json").write_text('{"blocks": []}')
    notices: list[str] = []
    assert reading.read_object(tmp_path / "diagnosis.json", notices, reading.clean_diagnosis) is None
    assert notices == ["diagnosis.json lacks what a report needs and was left out."]


def test_the_last_row_of_a_step_counts_and_damaged_lines_are_counted():
    lines = ['{"step": 2, "loss": 1}', '{"step": 1}', "", '{"step": 2, "loss": 3}', '{"step": 3, "lo', "[4]"]
    notices: list[str] = []
    rows = reading.rows_by_step(lines, "metrics.jsonl", notices)
    assert rows == [{"step": 1}, {"step": 2, "loss": 3}]
    assert notices == ["metrics.jsonl: 2 damaged lines were skipped."]


def test_a_summary_keeps_only_numbers_with_intervals_of_two_ends():
    measures = {"accuracy": {"value": 0.5, "binomial": [0.4, 0.6], "bootstrap": [0.4]}, "f1": {"value": "high"}, "x": 3}
    cleaned = reading.clean_summary({"task": "t", "measures": measures, "target_loss": None})
    expected = {"accuracy": {"value": 0.5, "binomial": [0.4, 0.6]}}
    assert cleaned == {"task": "t", "measures": expected, "target_loss": None}


def test_a_summary_of_the_first_questions_is_partial():
    assert reading.is_partial({"examples": 10, "questions": 100})
    assert not reading.is_partial({"examples": 100, "questions": 100})
    assert not reading.is_partial({})


@given(JSON)
def test_no_content_of_a_file_raises(value):
    notices: list[str] = []
    reading.rows_by_step([json.dumps(value)], "metrics.jsonl", notices)
    if isinstance(value, dict):
        reading.clean_summary(value)
        reading.clean_diagnosis(value)
        reading.clean_mismatch(value)
