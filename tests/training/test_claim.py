"""A run that fails before its first step leaves its folder free; one that has trained can be resumed."""

from __future__ import annotations

import os
import signal

import pytest

import nalora
from nalora.files import atomic
from nalora.runs import checkpoints
from nalora.runs.folder import RunFolder
from nalora.runs.settings import check
from nalora.training.claim import claimed

SETTINGS = {"model": "smollm2-135m", "task": "gsm8k"}


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path / "runs" / "run")


def start(folder, do, *, resume=False, **settings):
    with claimed(folder, check({**SETTINGS, **settings}), resume=resume, device="cpu") as claim:
        do()
    return claim.checkpoint


def checkpoint(folder, step):
    place = folder.checkpoints / f"checkpoint-{step}"
    checkpoints.begin(place)
    (place / "trainer_state.json").write_text("{}")
    return place


def fail(error=RuntimeError):
    raise error("as asked")


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, MemoryError])
def test_a_start_that_fails_leaves_nothing(folder, error):
    def get_as_far_as_the_first_step():
        folder.snapshot(0).mkdir(parents=True)
        atomic.note_created(folder.snapshot(0))
        atomic.write(folder.gates, '{"blocks": []}\n')
        folder.start.mkdir()
        atomic.write(folder.start / "start.safetensors", b"")
        (folder.checkpoints / "runs" / "today").mkdir(parents=True)
        (folder.checkpoints / "runs" / "today" / f"events.out.tfevents.1.host.{os.getpid()}.0").write_bytes(
            b"tensorboard's"
        )
        checkpoint(folder, 1)  # without the mark that it is whole
        fail(error)

    with pytest.raises(error):
        start(folder, get_as_far_as_the_first_step)
    assert not folder.path.exists()
    start(folder, lambda: None, rank=4)
    assert folder.settings.is_file()


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_signal_before_the_first_step_leaves_nothing(folder, name):
    number = getattr(signal, name)
    before = signal.signal(number, signal.SIG_DFL)  # nohup ignores one of them
    try:
        with pytest.raises(SystemExit) as ended:
            start(folder, lambda: os.kill(os.getpid(), number))
        assert signal.getsignal(number) == signal.SIG_DFL
    finally:
        signal.signal(number, before)
    assert ended.value.code == 128 + number
    assert not folder.path.exists()


def test_an_ignored_signal_stays_ignored(folder):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        start(folder, lambda: os.kill(os.getpid(), signal.SIGHUP))
    finally:
        signal.signal(signal.SIGHUP, before)
    assert folder.settings.is_file()


def test_an_empty_folder_of_the_user_s_stays(folder):
    folder.path.mkdir(parents=True)
    with pytest.raises(RuntimeError):
        start(folder, fail)
    assert list(folder.path.iterdir()) == []


def test_files_that_another_program_puts_there_meanwhile_stay(folder):
    names = {
        "notes.txt", "checkpoints/best/weights.bin", "checkpoints/checkpoint-3/mine.pt", "snapshots/a",
        # Names that nalora uses as well, later in a run.
        "model/weights.bin", "adapter/mine.txt", "start/mine", "diagnosis.json", "mismatch.json", "gates.jsonl",
        ".run.yaml.1", "snapshots/step-00000000/mine", "checkpoints/runs/events.out.tfevents.1.host.mine.0",
    }  # fmt: skip

    def somebody_writes():
        for name in names:
            (folder.path / name).parent.mkdir(parents=True, exist_ok=True)
            (folder.path / name).write_text("mine")
        fail()

    with pytest.raises(RuntimeError):
        start(folder, somebody_writes)
    left = {str(each.relative_to(folder.path)) for each in folder.path.rglob("*") if each.is_file()}
    assert left == names


def test_a_start_killed_at_its_very_beginning_can_be_repeated(folder):
    folder.mark()
    (folder.path / ".environment.json.123").write_text("{")
    start(folder, lambda: None)
    assert folder.settings.is_file()


def test_remains_without_run_yaml_are_not_touched(folder):
    start(folder, lambda: folder.metrics.write_text('{"step": 1}\n'))
    folder.settings.unlink()
    with pytest.raises(nalora.NALoRAError, match="a run whose run.yaml is missing"):
        start(folder, lambda: None)
    assert folder.metrics.read_text() == '{"step": 1}\n'


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_one_sentence(folder):
    folder.path.parent.mkdir(mode=0o500)
    with pytest.raises(nalora.NALoRAError, match="be written"):
        start(folder, lambda: None)


def test_a_parent_that_is_a_file_is_one_sentence(folder):
    folder.path.parent.write_text("mine")
    with pytest.raises(nalora.NALoRAError, match="a file and not a folder"):
        start(folder, lambda: None)
    assert folder.path.parent.read_text() == "mine"


@pytest.mark.parametrize("trace", ["metrics", "checkpoint"])
def test_a_run_that_has_trained_can_be_resumed(folder, trace):
    def train_a_step():
        if trace == "metrics":
            folder.metrics.write_text('{"step": 1, "loss": 2.0}\n')
        else:
            checkpoints.complete(checkpoint(folder, 1))
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
