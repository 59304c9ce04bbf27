"""One run of a study: what was asked is not asked again, what is no longer kept is made again."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace

import pytest
import tiny

from nalora.studies.job import Job, work
from nalora.studies.store import ANSWERS, TEST, VALIDATION, Store


@pytest.fixture
def job(tmp_path):
    settings = {
        "model": tiny.saved_llama(tmp_path / "base"), "task": "gym/chain_sum", "train_size": 40, "test_size": 6,
        "settings": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}, "rank": 4, "steps": 2,
        "batch_size": 4, "device": "cpu", "max_new_tokens": 4, "validation_size": 8,
    }  # fmt: skip
    return Job("run", settings, (VALIDATION,), str(tmp_path / "store"), "a run")


def asking(job, *parts):
    return Job(job.key, job.settings, parts, job.store, job.label)


def test_a_run_without_its_weights_answers_what_is_known_and_is_trained_again_for_more(job):
    store = Store(job.store)
    folder = store.folder("run")
    work(job)
    before = store.result("run")
    assert before.has(VALIDATION)
    assert not before.has(TEST)
    shutil.rmtree(folder.adapter)
    work(job)
    assert store.result("run") == before
    assert not folder.adapter.is_dir()
    work(asking(job, VALIDATION, TEST, ANSWERS))
    after = store.result("run")
    assert folder.adapter.is_dir()
    assert all(after.has(part) for part in (VALIDATION, TEST, ANSWERS))
    assert after.losses[VALIDATION] == before.losses[VALIDATION]


def test_more_questions_need_no_second_training(job):
    work(job)
    stamp = Store(job.store).folder("run").result.stat().st_mtime_ns
    work(asking(job, TEST))
    assert Store(job.store).folder("run").result.stat().st_mtime_ns == stamp
    assert Store(job.store).result("run").has(TEST)


def test_a_run_on_pictures_is_asked_everything_that_a_study_asks(tmp_path):
    pytest.importorskip("sklearn")
    from tasks.test_clip import saved_clip

    settings = {
        "model": saved_clip(tmp_path / "clip"), "task": "digits", "steps": 1, "device": "cpu", "validation_size": 60,
    }  # fmt: skip
    work(Job("run", settings, (VALIDATION, TEST, ANSWERS), str(tmp_path / "store"), "a run"))
    result = Store(tmp_path / "store").result("run")
    assert all(result.has(part) for part in (VALIDATION, TEST, ANSWERS))
    assert result.losses[VALIDATION] != result.losses[TEST]


def test_questions_without_one_right_answer_are_asked_too(job, monkeypatch):
    from nalora.tasks import gym

    asked = gym.Gym.test_examples
    monkeypatch.setattr(gym.Gym, "test_examples", lambda self: [replace(e, target="") for e in asked(self)])
    work(asking(job, VALIDATION, TEST, ANSWERS))
    result = Store(job.store).result("run")
    assert all(result.has(part) for part in (VALIDATION, TEST, ANSWERS))
    assert math.isfinite(result.losses[VALIDATION])
    assert math.isnan(result.losses[TEST])
