"""The evaluations of a run that count: its own task, all questions for a loss, enough questions for answers."""

from __future__ import annotations

import json

import pytest

import nalora
from nalora.runs.settings import check
from nalora.studies.store import ANSWERS, TEST, VALIDATION, Store, key

OWN = "gym/chain_sum"


def write(path, **content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def write_evaluation(place, name, *, task=OWN, examples=6, loss=1.0, accuracy=0.5):
    measures = {"accuracy": {"value": accuracy}} if name == "summary" else {}
    write(place / f"{name}.json", task=task, examples=examples, target_loss={"value": loss}, measures=measures)


@pytest.fixture
def evaluations(tmp_path):
    """The evaluations of a run of which a study has evaluated all parts."""
    write(tmp_path / "run" / "result.json", task=OWN, train_loss=1.0, seconds=1.0, examples=40)
    place = tmp_path / "run" / "evaluations"
    write_evaluation(place / "gym/chain_sum-validation/adapted-5", "losses", loss=2.0, examples=8)
    write_evaluation(place / "gym/chain_sum/adapted-5", "losses", loss=3.0)
    write_evaluation(place / "gym/chain_sum/adapted-5", "summary", loss=3.0)
    return place


def result(evaluations, test_limit=None):
    return Store(evaluations.parents[1]).result("run", test_limit)


def test_evaluations_of_a_study_are_known(evaluations):
    found = result(evaluations)
    assert found.losses == {VALIDATION: 2.0, TEST: 3.0}
    assert found.measures == {"accuracy": 0.5}


@pytest.mark.parametrize("place", ["gym/leg_counting/adapted-9", "zeros/adapted-9", "zeros-validation/adapted-9"])
@pytest.mark.parametrize("name", ["losses", "summary"])
def test_another_task_changes_nothing(evaluations, place, name):
    before = result(evaluations)
    write_evaluation(evaluations / place, name, task="another", loss=9.0, accuracy=0.9)
    assert result(evaluations) == before


def test_a_few_questions_of_its_own_task_change_no_loss(evaluations):
    for folder in ("adapted-5", "adapted-9"):  # as before, and with other prompts
        write_evaluation(evaluations / OWN / folder, "summary", examples=3, loss=9.0, accuracy=0.9)
    assert result(evaluations).losses == {VALIDATION: 2.0, TEST: 3.0}


@pytest.mark.parametrize(
    ("answered", "test_limit", "counts"),
    [(6, None, True), (3, None, False), (3, 3, True), (3, 4, False), (6, 3, True), (6, 100, True)],
)
def test_answers_count_if_there_are_as_many_as_the_study_needs(evaluations, answered, test_limit, counts):
    write_evaluation(evaluations / OWN / "adapted-5", "summary", examples=answered)
    found = result(evaluations, test_limit)
    assert found.has(ANSWERS) == counts
    assert found.measures == ({"accuracy": 0.5} if counts else {})


def test_answers_without_a_test_loss_do_not_count(evaluations):
    (evaluations / OWN / "adapted-5" / "losses.json").unlink()
    found = result(evaluations)
    assert not found.has(TEST)
    assert not found.has(ANSWERS)


def test_a_run_is_the_same_however_it_is_watched_and_another_with_other_passes():
    run = {"model": "smollm2-135m", "task": OWN, "batch_size": 8}
    watched = {"save_every": 50, "log_every": 1, "device": "cpu", "output": "elsewhere"}
    assert key(check(run | watched)) == key(check(run))
    assert key(check(run | {"micro_batch_size": 4})) != key(check(run)), "LoRA-GA and GoRA start elsewhere"


@pytest.mark.parametrize("content", [b"5", b"[]", b"\xff", b"", b'{"task": "t", "target_loss": 5}'])
@pytest.mark.parametrize("name", ["result.json", "evaluations/t/adapted-0/losses.json"])
def test_damaged_files_are_as_if_they_were_not_there(tmp_path, name, content):
    place = tmp_path / "run"
    (place / "evaluations/t/adapted-0").mkdir(parents=True)
    (place / "result.json").write_text('{"task": "t"}')
    (place / name).write_bytes(content)
    found = Store(tmp_path).result("run")
    assert found is None or found.losses == {}


def test_a_log_of_another_program_makes_no_store(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    (tmp_path / "0123456789abcdef.log").write_text("mine")
    with pytest.raises(nalora.NALoRAError):
        Store(tmp_path).claim()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["0123456789abcdef.log", "thesis.tex"]


def test_keys_of_earlier_versions_do_not_change():
    """Computed at 0.1: a changed key would train every stored run again."""
    keys = {"61cd7aac71b3dc6e": {"model": "smollm2-135m", "task": "gsm8k"}}
    assert {key(check(options)): options for options in keys.values()} == keys
