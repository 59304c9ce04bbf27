"""Workers of every engine: one process at a time works on a run, and a terminated process is not a failed run."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import signal
import time
from types import SimpleNamespace

import dummies
import pytest
import torch

import nalora
from nalora.studies import engines
from nalora.studies.conduct import conduct
from nalora.studies.engines import LocalEngine, attempt
from nalora.studies.job import log_of
from nalora.studies.outcome import Outcome
from nalora.studies.schedule import Schedule
from nalora.studies.store import Store
from nalora.training.run import Interrupted


@pytest.fixture
def job(tmp_path):
    return Schedule(dummies.study(), str(tmp_path)).open_jobs({}, {})[0]


def test_a_job_waits_for_another_process_that_works_on_the_same_run(job):
    engine = LocalEngine(1, do=dummies.pretend)
    try:
        with log_of(job).open("ab") as another:
            fcntl.flock(another, fcntl.LOCK_EX)
            engine.submit(job)
            while b"waiting until it ends" not in log_of(job).read_bytes():
                assert engine.wait(0.1) == []
            assert engine.wait(0.5) == []
            assert Store(job.store).result(job.key) is None
        assert engine.wait(60) == [Outcome(job.key, None)]
        assert Store(job.store).result(job.key) is not None
    finally:
        engine.close()


def test_a_terminated_process_ends_and_the_run_has_not_failed(job):
    def stopped(job):
        raise Interrupted("stopped after step 3")

    with pytest.raises(SystemExit):
        attempt(job, stopped)


def test_a_log_that_cannot_be_written_is_an_error_and_the_process_continues(job):
    log_of(job).symlink_to("/dev/full")
    assert attempt(job, lambda job: os.write(1, b"a word")).startswith("the disk is full (OSError")
    log_of(job).unlink()
    log_of(job).mkdir()
    assert attempt(job, dummies.pretend).startswith("IsADirectoryError")


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


def say_which_gpu(job):
    log_of(job).with_suffix(".gpu").write_text(os.environ["CUDA_VISIBLE_DEVICES"])


@pytest.mark.parametrize(
    ("visible", "expected"),
    [(None, ["0", "1"]), ("2,3", ["2", "3"]), ("GPU-8932f937, GPU-d72a1b3c,GPU-0", ["GPU-8932f937", "GPU-d72a1b3c"])],
)
def test_workers_are_on_the_gpus_that_the_study_may_use(two_gpus, workers, monkeypatch, visible, expected):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    engine = LocalEngine(per_gpu=2)
    for name in "abcd":
        engine.submit(SimpleNamespace(key=name))
    assert not engine.has_room()
    assert [worker.gpu for worker in workers] == expected * 2


@pytest.mark.slow
def test_a_worker_sees_its_gpu_alone(job, two_gpus, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    engine = LocalEngine(1, do=say_which_gpu)
    try:
        engine.submit(job)
        assert engine.wait(60) == [Outcome(job.key, None)]
    finally:
        engine.close()
    assert log_of(job).with_suffix(".gpu").read_text() == "2"


def write_threads(job):
    log_of(job).with_suffix(".threads").write_text(f"{torch.get_num_threads()} {os.environ['OMP_NUM_THREADS']}")


def test_workers_without_gpus_share_the_cores(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(engines, "_cores", lambda: 7)
    first, second = Schedule(dummies.study(), str(tmp_path)).open_jobs({}, {})[:2]
    engine = LocalEngine(2, do=write_threads)
    try:
        engine.submit(first)
        engine.submit(second)
        ended = []
        while len(ended) < 2:
            ended += engine.wait(60)
    finally:
        engine.close()
    assert [log_of(job).with_suffix(".threads").read_text() for job in (first, second)] == ["3 3", "3 3"]


@pytest.mark.parametrize(
    ("count", "variable", "expected"),
    [(2, None, 3), (4, None, 1), (9, None, 1), (1, None, None), (2, "5", None), (2, "", 3)],
)
def test_the_number_of_threads_of_a_worker(workers, monkeypatch, count, variable, expected):
    monkeypatch.setattr(engines, "_cores", lambda: 7)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    LocalEngine(count).submit(SimpleNamespace(key="a"))
    assert workers[0].threads == expected


def test_workers_on_gpus_keep_their_threads(two_gpus, workers, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    LocalEngine().submit(SimpleNamespace(key="a"))
    assert workers[0].threads is None


def test_the_cores_are_those_that_the_process_may_use():
    assert engines._cores() == len(os.sched_getaffinity(0))


class Obedient:
    """A worker without a process, whose replies the test sends."""

    def __init__(self, gpu, threads, do):
        self.gpu, self.threads, self.job, self.stopped = gpu, threads, None, False
        self.process = SimpleNamespace(is_alive=lambda: True)
        self.pipe, self.theirs = multiprocessing.Pipe()

    def stop(self):
        self.stopped = True


@pytest.fixture
def workers(monkeypatch):
    """All workers, as they were started."""
    started = []
    monkeypatch.setattr(
        "nalora.studies.engines._Worker", lambda *arguments: started.append(Obedient(*arguments)) or started[-1]
    )
    return started


def out_of_memory(engine, workers, *names):
    """Jobs of these names run, and find no memory at the same time; which of them may be tried again."""
    for name in names:
        engine.submit(SimpleNamespace(key=name))
    for worker in workers:
        if worker.job and worker.job.key in names:
            worker.theirs.send("OutOfMemoryError: CUDA out of memory")
    ended = engine.wait(1)
    assert sorted(each.key for each in ended) == sorted(names)
    return [each.key for each in ended if engine.reduce_sharing(each.key)]


def test_a_place_is_given_up_on_the_gpu_that_was_too_small(two_gpus, workers):
    engine = LocalEngine(per_gpu=2)
    engine.submit(SimpleNamespace(key="first"))
    engine.submit(SimpleNamespace(key="second"))
    workers[0].theirs.send(None)
    assert engine.wait(1) == [Outcome("first", None)]
    workers[1].theirs.send("OutOfMemoryError: CUDA out of memory")  # GPU 0, before it in the list, is free
    engine.wait(1)
    assert engine.reduce_sharing("second")
    assert engine._gpus == ["0", "0", "1"]
    assert [worker.gpu for worker in workers if worker.stopped] == ["1"]


def test_a_run_that_has_the_gpu_for_itself_is_not_tried_again(two_gpus, workers):
    engine = LocalEngine(per_gpu=1)
    assert out_of_memory(engine, workers, "one", "two") == []
    assert engine._gpus == ["0", "1"]


def test_all_runs_that_shared_a_gpu_are_tried_again(workers):
    engine = LocalEngine(3)
    assert sorted(out_of_memory(engine, workers, "a", "b", "c")) == ["a", "b", "c"]
    assert len(engine._gpus) == 2
    assert sorted(out_of_memory(engine, workers, "a", "b")) == ["a", "b"]
    assert out_of_memory(engine, workers, "a") == []
    assert len(engine._gpus) == 1


def lose_the_gpu_or_say_who(job):
    """The first seed's run ends as after a bad access on a GPU; the others leave their process's number."""
    if job.settings["seed"] == 0:
        log_of(job).with_suffix(".who").write_text(str(os.getpid()))
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    dummies.pretend(job)
    log_of(job).with_suffix(".who").write_text(str(os.getpid()))


@pytest.mark.slow
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


def save_when_terminated(job):
    """As a training run does: at SIGTERM it saves where it is."""
    signals = []
    signal.signal(signal.SIGTERM, lambda *_: signals.append(True))
    log_of(job).with_suffix(".begun").touch()
    while not signals:
        time.sleep(0.01)
    log_of(job).with_suffix(".saved").touch()
    raise Interrupted("stopped after step 3")


def test_closing_lets_runs_save_where_they_are(job):
    engine = LocalEngine(1, do=save_when_terminated)
    engine.submit(job)
    while not log_of(job).with_suffix(".begun").exists():
        assert engine.wait(0.05) == []
    engine.close()
    assert log_of(job).with_suffix(".saved").exists()


def hear_nothing(job):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    log_of(job).with_suffix(".begun").write_text(str(os.getpid()))
    time.sleep(600)


@pytest.mark.slow
def test_a_worker_that_does_not_end_is_killed(job, monkeypatch):
    monkeypatch.setattr("nalora.studies.engines.SECONDS_TO_END", 0.3)
    engine = LocalEngine(1, do=hear_nothing)
    engine.submit(job)
    while not log_of(job).with_suffix(".begun").exists():
        assert engine.wait(0.05) == []
    engine.close()
    with pytest.raises(ProcessLookupError):
        os.kill(int(log_of(job).with_suffix(".begun").read_text()), 0)


@pytest.fixture
def no_locks(monkeypatch):
    """As a file system answers that was mounted without them."""

    def refuse(file, how):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)


def test_without_file_locks_nothing_is_started(tmp_path, no_locks):
    with pytest.raises(nalora.NALoRAError, match=r"file system without file locks \(No locks available\)"):
        conduct(dummies.study(), tmp_path / "store", dummies.Instantly())
    assert list((tmp_path / "store").iterdir()) == []


def test_a_worker_refuses_a_run_that_it_cannot_lock(job, no_locks):
    """A node of a cluster may have mounted the store in another way than the study's machine."""
    error = attempt(job, dummies.pretend)
    assert "without file locks" in error
    assert not Outcome(job.key, error).may_be_repeated
    assert Store(job.store).result(job.key) is None


def test_a_log_that_leads_out_of_the_store_is_refused_and_what_it_leads_to_stays(tmp_path):
    theirs = tmp_path / "theirs.txt"
    theirs.write_text("mine")
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "run.log").symlink_to(theirs)
    for opened in (engines._output_to, engines._locked):
        with pytest.raises(nalora.NALoRAError, match="a symbolic link"), opened(tmp_path / "store" / "run.log"):
            print("from the run")
    assert theirs.read_text() == "mine"
