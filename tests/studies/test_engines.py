"""What every engine's workers keep to: one process at a run, and no blame for a process that was told to end."""

from __future__ import annotations

import fcntl
import os
import signal
import time

import dummies
import pytest

from nalora.studies.engines import Ended, LocalEngine, attempt
from nalora.studies.job import log_of
from nalora.studies.schedule import Schedule
from nalora.studies.store import Store
from nalora.training.run import Interrupted


@pytest.fixture
def job(tmp_path):
    return Schedule(dummies.study(), str(tmp_path)).open_jobs({}, {})[0]


def test_a_run_that_another_process_is_at_waits_for_it(job):
    engine = LocalEngine(1, do=dummies.pretend)
    try:
        with log_of(job).open("ab") as another:
            fcntl.flock(another, fcntl.LOCK_EX)
            engine.submit(job)
            while b"waiting for its end" not in log_of(job).read_bytes():
                assert engine.wait(0.1) == []
            assert engine.wait(0.5) == []
            assert Store(job.store).result(job.key) is None
        assert engine.wait(60) == [Ended(job.key, None)]
        assert Store(job.store).result(job.key) is not None
    finally:
        engine.close()


def test_a_process_that_was_told_to_end_does_so_and_the_run_is_not_called_a_failure(job):
    def stopped(job):
        raise Interrupted("stopped after step 3")

    with pytest.raises(SystemExit):
        attempt(job, stopped)


def lose_the_gpu_or_say_who(job):
    """The first seed's run ends as after a bad access on a GPU; the others leave their process's number."""
    if job.settings["seed"] == 0:
        log_of(job).with_suffix(".who").write_text(str(os.getpid()))
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    dummies.pretend(job)
    log_of(job).with_suffix(".who").write_text(str(os.getpid()))


def test_after_a_lost_gpu_the_next_run_has_a_process_of_its_own(tmp_path):
    study = dummies.study(arms={"lora": {"method": "lora"}}, learning_rates=[1e-3])
    first, second, third = Schedule(study, str(tmp_path)).open_jobs({}, {})
    engine = LocalEngine(1, do=lose_the_gpu_or_say_who)
    try:
        for job, fails in ((first, True), (second, False), (third, False)):
            engine.submit(job)
            (ended,) = engine.wait(60)
            assert (ended.error is not None) == fails
    finally:
        engine.close()
    who = [log_of(job).with_suffix(".who").read_text() for job in (first, second, third)]
    assert who[0] != who[1] == who[2]


def save_when_told(job):
    """As a training run does: at SIGTERM it saves where it is."""
    told = []
    signal.signal(signal.SIGTERM, lambda *_: told.append(True))
    log_of(job).with_suffix(".begun").touch()
    while not told:
        time.sleep(0.01)
    log_of(job).with_suffix(".saved").touch()
    raise Interrupted("stopped after step 3")


def test_closing_lets_runs_save_where_they_are(job):
    engine = LocalEngine(1, do=save_when_told)
    engine.submit(job)
    while not log_of(job).with_suffix(".begun").exists():
        assert engine.wait(0.05) == []
    engine.close()
    assert log_of(job).with_suffix(".saved").exists()


def hear_nothing(job):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    log_of(job).with_suffix(".begun").write_text(str(os.getpid()))
    time.sleep(600)


def test_a_worker_that_does_not_end_is_killed(job, monkeypatch):
    monkeypatch.setattr("nalora.studies.engines._SECONDS_TO_END", 0.3)
    engine = LocalEngine(1, do=hear_nothing)
    engine.submit(job)
    while not log_of(job).with_suffix(".begun").exists():
        assert engine.wait(0.05) == []
    engine.close()
    with pytest.raises(ProcessLookupError):
        os.kill(int(log_of(job).with_suffix(".begun").read_text()), 0)
