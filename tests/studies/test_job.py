"""One run of a study: evaluations are not repeated, and deleted weights are trained again if they are needed."""

from __future__ import annotations

import math
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import transformers

import nalora.training.run as training
from nalora import NALoRAError
from nalora.runs import targets
from nalora.runs.saved_run import read_run
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


def evaluating(job, *parts):
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
    work(evaluating(job, VALIDATION, TEST, ANSWERS))
    after = store.result("run")
    assert folder.adapter.is_dir()
    assert all(after.has(part) for part in (VALIDATION, TEST, ANSWERS))
    assert after.losses[VALIDATION] == before.losses[VALIDATION]


def test_the_model_is_loaded_once_for_all_parts(job, monkeypatch):
    """The parts are those that an evaluation of each alone gives, under the same keys."""
    loads, load = [], targets.load
    monkeypatch.setattr(targets, "load", lambda target, **options: (loads.append(target), load(target, **options))[1])
    work(evaluating(job, VALIDATION, TEST, ANSWERS))
    assert len(loads) == 1
    store = Store(job.store)
    together = store.result("run")
    shutil.rmtree(store.folder("run").evaluations)
    for part in (VALIDATION, TEST, ANSWERS):
        work(evaluating(job, part))
    assert len(loads) == 4
    assert store.result("run") == together


def test_a_run_that_diverged_is_a_result_and_is_neither_evaluated_nor_trained_again(job):
    diverging = replace(job, settings={**job.settings, "learning_rate": 1e30, "steps": 12})
    with pytest.raises(NALoRAError, match="diverged"):
        work(diverging)
    store = Store(job.store)
    known = store.result("run")
    assert known.diverged
    assert known.losses == {VALIDATION: math.inf, TEST: math.inf}
    stamp = store.folder("run").result.stat().st_mtime_ns
    work(replace(diverging, parts=(VALIDATION, TEST, ANSWERS)))
    assert store.folder("run").result.stat().st_mtime_ns == stamp
    assert not store.folder("run").evaluations.exists()


def test_a_run_that_diverges_when_it_is_trained_again_does_not_replace_what_is_known(job):
    work(job)
    store = Store(job.store)
    known = store.result("run")
    shutil.rmtree(store.folder("run").adapter)
    new = Store(Path(job.store) / "run.again").folder("new")
    new.path.mkdir(parents=True)
    new.result.write_text('{"diverged": true, "diverged_step": 1}')
    with pytest.raises(NALoRAError, match="found a run that diverged; expected the result that it had"):
        work(evaluating(job, VALIDATION, TEST))
    assert store.result("run") == known


def test_more_questions_need_no_second_training(job):
    work(job)
    stamp = Store(job.store).folder("run").result.stat().st_mtime_ns
    work(evaluating(job, TEST))
    assert Store(job.store).folder("run").result.stat().st_mtime_ns == stamp
    assert Store(job.store).result("run").has(TEST)


def test_a_run_on_images_is_evaluated_on_all_parts(tmp_path):
    pytest.importorskip("sklearn")
    from tasks.test_clip import saved_clip

    settings = {
        "model": saved_clip(tmp_path / "clip"), "task": "digits", "steps": 1, "device": "cpu", "validation_size": 60,
    }  # fmt: skip
    work(Job("run", settings, (VALIDATION, TEST, ANSWERS), str(tmp_path / "store"), "a run"))
    result = Store(tmp_path / "store").result("run")
    assert all(result.has(part) for part in (VALIDATION, TEST, ANSWERS))
    assert result.losses[VALIDATION] != result.losses[TEST]


def test_questions_without_one_correct_answer_are_evaluated_too(job, monkeypatch):
    from nalora.tasks import gym

    original = gym.Gym.test_examples
    monkeypatch.setattr(gym.Gym, "test_examples", lambda self: [replace(e, target="") for e in original(self)])
    work(evaluating(job, VALIDATION, TEST, ANSWERS))
    result = Store(job.store).result("run")
    assert all(result.has(part) for part in (VALIDATION, TEST, ANSWERS))
    assert math.isfinite(result.losses[VALIDATION])
    assert math.isnan(result.losses[TEST])


def test_evaluations_of_the_user_do_not_change_a_study(job):
    from nalora.evaluation.targets import Request, evaluate_target

    everything = evaluating(job, VALIDATION, TEST, ANSWERS)
    work(everything)
    store, run = Store(job.store), str(Store(job.store).folder("run").path)
    before = store.result("run")
    other = {"train_size": 4, "test_size": 2, "settings": {}, "max_new_tokens": 4}
    evaluate_target(run, Request(task="gym/spell_backward", options=other, with_base=False))
    assert store.result("run") == before
    evaluate_target(run, Request(limit=3, with_base=False))
    assert store.result("run") == before


def test_a_study_of_all_questions_evaluates_those_that_an_earlier_limit_left_out(job):
    few = replace(evaluating(job, VALIDATION, TEST, ANSWERS), test_limit=2)
    work(few)
    store = Store(job.store)
    assert store.result("run", test_limit=2).has(ANSWERS)
    assert not store.result("run").has(ANSWERS)
    before = store.result("run").losses
    work(replace(few, test_limit=None))
    assert store.result("run").has(ANSWERS)
    assert store.result("run").losses == before


@pytest.fixture
def without_weights(job):
    """A finished run whose weights are not kept, and what is known of it."""
    work(job)
    shutil.rmtree(Store(job.store).folder("run").adapter)
    return Store(job.store).result("run")


def folders(job):
    return {path.name for path in Path(job.store).iterdir() if path.is_dir()}


def test_a_second_training_that_cannot_be_leaves_the_first_one_s_result(job, without_weights):
    base, elsewhere = Path(job.settings["model"]), Path(job.settings["model"]).with_name("elsewhere")
    base.rename(elsewhere)
    with pytest.raises(NALoRAError, match="base"):
        work(evaluating(job, VALIDATION, TEST))
    assert Store(job.store).result("run") == without_weights
    elsewhere.rename(base)
    work(evaluating(job, TEST))
    after = Store(job.store).result("run")
    assert after.losses[VALIDATION] == without_weights.losses[VALIDATION], "evaluated again, because it was known"
    assert after.has(TEST)
    assert folders(job) == {"run"}


def test_a_second_training_that_is_stopped_continues_where_it_was(job, without_weights, monkeypatch):
    began: list[int] = []

    class StopOnce(transformers.TrainerCallback):
        def on_train_begin(self, args, state, control, **_):
            began.append(state.global_step)

        def on_step_begin(self, args, state, control, **_):
            if len(began) == 1:
                os.kill(os.getpid(), signal.SIGINT)

    make = training.make_trainer
    monkeypatch.setattr(training, "make_trainer", lambda *a: (t := make(*a)).add_callback(StopOnce()) or t)
    with pytest.raises(training.Interrupted, match="after step 1"):
        work(evaluating(job, VALIDATION, TEST))
    assert Store(job.store).result("run") == without_weights
    assert len(list(Path(job.store).glob("*/result.json"))) == 1, "no other folder is taken for a run"
    work(evaluating(job, VALIDATION, TEST))
    assert began == [0, 1]
    assert Store(job.store).result("run").losses[VALIDATION] == without_weights.losses[VALIDATION]


KILLED_BEFORE = {
    "the old one goes": (Path, "rename", 1),
    "the new one comes": (Path, "rename", 2),
    "the old one is deleted": (shutil, "rmtree", 1),
}


@pytest.mark.parametrize("where", KILLED_BEFORE)
def test_killed_while_the_two_change_places_one_of_them_is_found(job, without_weights, monkeypatch, where):
    owner, name, count = KILLED_BEFORE[where]
    do, calls = getattr(owner, name), []

    def killed(path, *rest, **options):
        if "run.again" in f"{path}{rest}":
            calls.append(path)
            if len(calls) == count:
                raise KeyboardInterrupt
        return do(path, *rest, **options)

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, killed)
        with pytest.raises(KeyboardInterrupt):
            work(evaluating(job, VALIDATION, TEST))
    with monkeypatch.context() as patched:
        patched.setattr(training, "make_trainer", lambda *_: pytest.fail("trained a third time"))
        work(evaluating(job, VALIDATION, TEST))
    after, folder = Store(job.store).result("run"), Store(job.store).folder("run")
    assert after.losses[VALIDATION] == without_weights.losses[VALIDATION]
    assert after.has(TEST)
    assert folder.adapter.is_dir()
    assert read_run(folder).settings.output == str(folder.path)
    assert folders(job) == {"run"}


def test_what_is_not_the_run_s_own_moves_to_the_new_one(job, without_weights):
    """Notes, reports and other evaluations of a run that is trained again are somebody's work."""
    old, elsewhere = Store(job.store).folder("run").path, Path(job.store) / "elsewhere"
    elsewhere.mkdir()
    mine = ("notes.txt", "report.html", "evaluations/other/adapted-0/summary.json", "checkpoints/best/a.pt")
    for name in mine:
        (old / name).parent.mkdir(parents=True, exist_ok=True)
        (old / name).write_text("mine")
    (old / "link").symlink_to(elsewhere)
    stranger = Path(job.store) / f"{job.key}.again" / "mine.txt"
    stranger.parent.mkdir()
    stranger.write_text("mine")
    work(evaluating(job, VALIDATION, TEST))
    assert Store(job.store).result("run").has(TEST)
    assert [(old / name).read_text() for name in mine] == ["mine"] * len(mine)
    assert (old / "link").readlink() == elsewhere
    assert [each.name for each in stranger.parent.iterdir()] == ["mine.txt"]


def test_a_folder_of_another_program_next_to_a_run_is_not_taken_for_its_repetition(job, without_weights):
    aside = Path(job.store) / f"{job.key}.again"
    for name in ("old/a", "new/a"):
        (aside / name).parent.mkdir(parents=True)
        (aside / name).write_text("mine")
    work(job)
    assert sorted(str(each.relative_to(aside)) for each in aside.rglob("*")) == ["new", "new/a", "old", "old/a"]
