"""A run that fails before its first step leaves its folder free; one that has trained can be resumed."""

from __future__ import annotations

import pytest

import nalora
from nalora.training.claim import claimed
from nalora.training.folder import RunFolder
from nalora.training.settings import check

SETTINGS = {"model": "smollm2-135m", "task": "gsm8k"}


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path / "runs" / "run")


def start(folder, do, *, resume=False, **settings):
    with claimed(folder, check({**SETTINGS, **settings}), resume=resume, device="cpu") as checkpoint:
        do()
    return checkpoint


def fail(error=RuntimeError):
    raise error("as asked")


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, MemoryError])
def test_a_start_that_fails_leaves_nothing(folder, error):
    def get_as_far_as_the_first_step():
        folder.snapshot(0).mkdir(parents=True)
        folder.gates.write_text('{"blocks": []}\n')
        folder.metrics.write_text("")
        (folder.checkpoints / "checkpoint-1").mkdir(parents=True)  # without the mark that it is whole
        fail(error)

    with pytest.raises(error):
        start(folder, get_as_far_as_the_first_step)
    assert not folder.path.exists()
    start(folder, lambda: None, rank=4)
    assert folder.settings.is_file()


def test_other_files_stay(folder):
    folder.path.mkdir(parents=True)
    (folder.path / "notes.txt").write_text("mine")
    with pytest.raises(RuntimeError):
        start(folder, fail)
    assert [each.name for each in folder.path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("trace", ["metrics", "checkpoint"])
def test_a_run_that_has_trained_can_be_resumed(folder, trace):
    def train_a_step():
        if trace == "metrics":
            folder.metrics.write_text('{"step": 1, "loss": 2.0}\n')
        else:
            (folder.checkpoints / "checkpoint-1").mkdir(parents=True)
            (folder.checkpoints / "checkpoint-1" / "complete").touch()
        fail()

    with pytest.raises(RuntimeError):
        start(folder, train_a_step)
    with pytest.raises(nalora.NALoRAError, match="an unfinished run"):
        start(folder, lambda: None)
    assert (start(folder, lambda: None, resume=True) is not None) == (trace == "checkpoint")


def test_a_resumed_run_that_fails_again_stays(folder):
    start(folder, lambda: None)  # as a kill while loading leaves it
    with pytest.raises(RuntimeError):
        start(folder, fail, resume=True)
    assert folder.settings.is_file()


def test_a_refused_start_leaves_the_other_run(folder):
    start(folder, lambda: None)
    with pytest.raises(nalora.NALoRAError, match="an unfinished run"):
        start(folder, lambda: None)
    assert folder.settings.is_file()
