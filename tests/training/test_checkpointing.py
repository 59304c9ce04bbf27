"""By default a run is saved every few minutes, at a bounded cost, and a kill -9 loses no more than that."""

from __future__ import annotations

import os
import signal
import types

import pytest
import tiny
import torch
from forked import PROCESSES, until_there

from nalora.runs import checkpoints
from nalora.runs.folder import RunFolder
from nalora.runs.settings import RunSettings, check
from nalora.studies.store import key
from nalora.training import checkpointing
from nalora.training.checkpointing import SHARE_OF_TIME, CheckpointSchedule
from nalora.training.run import train


class Clock:
    """Training in which only saving and stepping take time."""

    def __init__(self, tmp_path, monkeypatch, *, minutes=5.0, cost=1.0, parameters=1000, free=1e15):
        self.now, self.cost, self.step = 0.0, cost, 0
        monkeypatch.setattr(checkpointing.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(checkpointing.shutil, "disk_usage", lambda _: types.SimpleNamespace(free=free))
        self.folder = RunFolder(tmp_path)
        self.schedule = CheckpointSchedule(self.folder, minutes)
        model = torch.nn.Linear(parameters, 1, bias=False, device="meta")
        self.trainer = types.SimpleNamespace(
            model=model, state=self.state(), _save_checkpoint=self.write, add_callback=lambda _: None
        )
        self.schedule.install(self.trainer)
        self.schedule.on_train_begin(None, self.state(), None)
        self.saved: list[float] = []

    def state(self):
        return types.SimpleNamespace(global_step=self.step, max_steps=10**9)

    def write(self, *_):
        self.now += self.cost

    def train(self, steps, seconds=1.0):
        for _ in range(steps):
            self.step += 1
            self.now += seconds
            self.trainer.state = self.state()
            control = types.SimpleNamespace(should_save=False)
            self.schedule.on_step_end(types.SimpleNamespace(device="cpu"), self.state(), control)
            if control.should_save:
                self.saved.append(self.now)
                self.trainer._save_checkpoint()
                self.schedule.on_save(None, self.state(), control)


def test_a_cheap_checkpoint_is_written_every_few_minutes_and_two_are_kept(tmp_path, monkeypatch):
    clock = Clock(tmp_path, monkeypatch)
    clock.train(3600)
    gaps = [late - early for early, late in zip([0.0, *clock.saved], clock.saved, strict=False)]
    assert len(clock.saved) >= 11
    assert all(300 <= gap <= 303 for gap in gaps)
    assert len(list(clock.folder.checkpoints.iterdir())) == 2


@pytest.mark.parametrize("cost", [20.0, 60.0, 600.0])
@pytest.mark.parametrize("parameters", [10, 10**9], ids=["small at first sight", "large"])
def test_dear_ones_stretch_the_interval_until_they_take_a_twentieth(tmp_path, monkeypatch, cost, parameters):
    clock = Clock(tmp_path, monkeypatch, cost=cost, parameters=parameters)
    clock.train(8_000, seconds=10.0)
    assert len(clock.saved) >= 2
    share = [(i * cost) / (at - 0.0) for i, at in enumerate(clock.saved)]
    assert all(each <= SHARE_OF_TIME for each in share[2:])
    assert clock.schedule.spent <= SHARE_OF_TIME * clock.now
    if parameters == 10**9:
        assert clock.saved[0] > 450, "12 GB are expected to take a while"


def test_zero_minutes_are_none(tmp_path, monkeypatch):
    clock = Clock(tmp_path, monkeypatch, minutes=0)
    clock.train(3600)
    assert clock.saved == []


def test_a_full_disk_does_not_end_the_run(tmp_path, monkeypatch, capsys):
    clock = Clock(tmp_path, monkeypatch, free=1000.0)
    clock.train(3600)
    assert clock.saved == []
    assert capsys.readouterr().err.count("no space") == 1


def test_it_is_on_by_default_and_no_run_s_name_changes_by_it():
    given = {"model": "smollm2-135m", "task": "gsm8k"}
    assert RunSettings("model", "task").save_minutes == 5
    assert {key(check(given | {"save_minutes": minutes})) for minutes in (0, 5, 17.5)} == {key(check(given))}


def train_until_killed(settings, saved) -> None:
    import transformers

    from nalora.training import run as running

    class Tell(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if state.global_step == 14:
                saved.touch()
                signal.pause()

    torch.set_num_threads(1)
    # Saves of a tiny model take a quarter of its time.
    checkpointing.SHARE_OF_TIME = 1.0
    make = running.make_trainer
    running.make_trainer = lambda *a: (t := make(*a)).add_callback(Tell()) or t
    running.train(check(settings))


@pytest.mark.skipif(not hasattr(signal, "pause"), reason="no such signal")
def test_a_killed_run_with_default_settings_resumes_from_its_last_checkpoint(tmp_path):
    settings = {
        "model": tiny.saved_llama(tmp_path / "base"), "task": "gym/chain_sum", "train_size": 64, "test_size": 4,
        "output": str(tmp_path / "killed"), "steps": 20, "batch_size": 8, "device": "cpu", "learning_rate": 1e-3,
        "save_minutes": 1e-6,
    }  # fmt: skip
    torch.set_num_threads(1)
    whole = settings | {"output": str(tmp_path / "whole"), "save_minutes": 5}
    train(check(whole))
    process = PROCESSES.Process(target=train_until_killed, args=(settings, tmp_path / "saved"))
    process.start()
    until_there(tmp_path / "saved")
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    folder = RunFolder(settings["output"])
    assert len(checkpoints.marked_complete(folder.checkpoints)) == 2
    last = folder.latest_checkpoint()
    assert checkpoints.step_in(last.name) >= 10
    train(check(settings), resume=True)
    one, other = (
        (RunFolder(each["output"]).adapter / "adapter_model.safetensors").read_bytes() for each in (whole, settings)
    )
    assert one == other
