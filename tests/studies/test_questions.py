"""Runs of a study on different questions share no column and no comparison."""

from __future__ import annotations

import json

import pytest
from dummies import Instantly, study

from nalora.studies.answer import answer
from nalora.studies.conduct import conduct, so_far
from nalora.studies.questions import column_suffixes, is_on_other_data, notes, questions_digest
from nalora.studies.store import TEST, Store

EVALUATED = {"questions": "aaaaaaaa", "options": {}, "style": "plain", "max_new_tokens": 8, "data": "x"}


def test_the_digest_depends_on_questions_options_style_and_length():
    summary = {"examples": 5, "evaluated": EVALUATED}
    assert questions_digest({"examples": 5}) == ""
    assert questions_digest(summary) == questions_digest(
        summary | {"evaluated": EVALUATED | {"data": "elsewhere", "own": True}}
    )
    for other in ({"questions": "b"}, {"style": "chat"}, {"options": {"n": 1}}, {"max_new_tokens": 9}):
        assert questions_digest(summary | {"evaluated": EVALUATED | other}) != questions_digest(summary)
    assert questions_digest(summary | {"examples": 4}) != questions_digest(summary)


def test_measures_get_other_names_only_where_questions_differ():
    same = dict.fromkeys("abc", 0)
    assert column_suffixes({"a": "11", "b": "11", "c": ""}, same) == {"a": "", "b": "", "c": ""}
    apart = column_suffixes({"a": "1111111", "b": "2222222", "c": ""}, same)
    assert apart == {"a": " (questions 111111)", "b": " (questions 222222)", "c": " (questions not recorded)"}


def test_questions_that_each_seed_draws_share_a_column():
    """As reasoning-gym's: arms are compared seed by seed."""
    digests = {"lora 0": "11", "na 0": "11", "lora 1": "22", "na 1": "22"}
    seeds = {"lora 0": 0, "na 0": 0, "lora 1": 1, "na 1": 1}
    assert set(column_suffixes(digests, seeds).values()) == {""}
    assert notes([(seeds[run], digests[run]) for run in digests], []) == []
    assert len(set(column_suffixes(digests | {"na 1": "33"}, seeds).values())) == 3


def test_notes_name_what_cannot_be_compared():
    assert notes([(0, ""), (0, "")], [(0, "")]) == notes([(0, "1"), (0, "1")], [(0, "2")]) == []
    assert "different questions" in notes([(0, "1"), (0, "2")], [])[0]
    assert "do not record" in notes([(0, "1"), (0, "")], [])[0]
    assert "Learning rates" in notes([(0, "1")], [(0, "2"), (0, "3")])[0]


def test_an_evaluation_on_other_data_does_not_replace_the_runs_own(tmp_path):
    place = tmp_path / "run"
    (place / "evaluations/t/adapted-1").mkdir(parents=True)
    (place / "evaluations/t/adapted-9").mkdir()
    (place / "result.json").write_text(json.dumps({"task": "t"}))
    own = {"task": "t", "examples": 5, "target_loss": {"value": 1.0}, "evaluated": EVALUATED | {"own": True}}
    other = own | {"target_loss": {"value": 9.0}, "evaluated": EVALUATED | {"questions": "b", "own": False}}
    (place / "evaluations/t/adapted-1/losses.json").write_text(json.dumps(own))
    (place / "evaluations/t/adapted-9/losses.json").write_text(json.dumps(other))
    assert is_on_other_data(other)
    found = Store(tmp_path).result("run")
    assert found.losses == {TEST: 1.0}
    assert found.questions == {TEST: questions_digest(own)}


@pytest.fixture
def finished(tmp_path):
    """A study whose runs have ended, and the files of their results."""
    described = study()
    conduct(described, tmp_path, Instantly())
    return described, tmp_path


def record_questions(store, of_method):
    """Record the questions of its method in every result."""
    for result in store.glob("*/result.json"):
        method = (result.parent / "method").read_text()
        for file in result.parent.rglob("*.json"):
            if file.name in ("losses.json", "summary.json") and of_method.get(method):
                summary = json.loads(file.read_text()) | {"evaluated": EVALUATED | {"questions": of_method[method]}}
                file.write_text(json.dumps(summary))


def table_of(described, store):
    progress = so_far(described, store)
    for job_key, method in {
        job.key: job.settings["method"]
        for cell in progress.schedule.cells
        for rate in cell.arm.learning_rates
        for job in [progress.schedule.job(cell, rate, seed) for seed in cell.arm.seeds]
    }.items():
        if (store / job_key).is_dir():
            (store / job_key / "method").write_text(method)
    return answer(progress.schedule, progress.results, progress.failed).parts[0]


def test_arms_on_different_questions_are_not_compared(finished):
    described, store = finished
    before = table_of(described, store)
    measures = [column.measure for column in before.table.columns]
    assert before.comparisons["test loss"]
    record_questions(store, {"lora": "aaaa", "na-lora": "aaaa"})
    same = table_of(described, store)
    assert [column.measure for column in same.table.columns] == measures
    assert same.comparisons == before.comparisons
    assert not any("questions" in note for note in same.notes)
    record_questions(store, {"lora": "aaaa", "na-lora": "bbbb"})
    apart = table_of(described, store)
    losses = [column for column in apart.table.columns if column.measure.startswith("test loss")]
    assert len(losses) == 2
    assert all(column.lower_is_better and column.scale == 1 for column in losses)
    assert not any(found for found in apart.comparisons.values())
    assert "different questions" in apart.notes[-1]
