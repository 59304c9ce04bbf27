"""A study is completed despite kills, failures and a full disk."""

from __future__ import annotations

import errno
import gc
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc
from collections import namedtuple
from pathlib import Path

import dummies
import pytest
import torch
from dummies import Attempting, Instantly

import nalora
from nalora.studies.conduct import conduct, so_far
from nalora.studies.engines import LocalEngine
from nalora.studies.store import TEST, Store
from nalora.training.run import Interrupted


def table(progress):
    return {key: (result.losses, result.measures) for key, result in sorted(progress.results.items())}


def test_a_study_is_completed_and_never_repeated(tmp_path):
    first, again = Instantly(), Instantly()
    progress = conduct(dummies.study(), tmp_path, first)
    assert len(progress.results) == progress.total == 6 + 4
    assert sum(TEST in result.losses for result in progress.results.values()) == 6
    assert table(conduct(dummies.study(), tmp_path, again)) == table(progress)
    assert again.submitted == []


def test_a_larger_study_only_does_what_is_new(tmp_path):
    conduct(dummies.study(), tmp_path, Instantly())
    more = Instantly()
    conduct(dummies.study(seeds=[0, 1, 2, 3, 4]), tmp_path, more)
    assert len(more.submitted) == 4


def test_partly_evaluated_runs_are_known_so_far_and_still_to_be_done(tmp_path):
    conduct(dummies.study(generate="none"), tmp_path, Instantly())
    known = so_far(dummies.study(), tmp_path)
    finals = [job for cell in known.schedule.cells for job in known.schedule.final(cell, dummies.BEST[cell.arm.name])]
    assert {job.key for job in finals} <= {*known.results}
    assert all(known.results[job.key].losses and not known.results[job.key].measures for job in finals)
    engine = Instantly()
    progress = conduct(dummies.study(), tmp_path, engine)
    assert {job.key for job in finals} == {*engine.submitted}
    assert all(progress.results[job.key].measures for job in finals)


def test_500_runs_take_less_than_50_ms_each(tmp_path):
    began = time.process_time()
    progress = conduct(dummies.study(over={"rank": list(range(1, 51))}), tmp_path, Instantly())
    seconds = time.process_time() - began
    assert len(progress.results) == progress.total == 500
    assert seconds / 500 < 0.05


def grown(store, engine, first, last):
    """How many MiB of what was made between these two runs are still held after the last."""
    sizes = []

    def look(progress):
        if progress.done >= first and not tracemalloc.is_tracing():
            gc.collect()
            tracemalloc.start()
        if progress.done >= last and not sizes:
            gc.collect()
            sizes.append(tracemalloc.get_traced_memory()[0] / 2**20)

    try:
        conduct(dummies.study(over={"rank": list(range(1, last // 10 + 1))}), store, engine, changed=look)
    finally:
        tracemalloc.stop()
    return sizes[0]


def test_more_runs_take_no_more_memory(tmp_path):
    assert grown(tmp_path / "sound", Instantly(), 300, 500) < 2
    kept = []
    leaking = Instantly(lambda job: kept.append(b"x" * (50 * 1024)) or dummies.pretend(job))
    assert grown(tmp_path / "leaking", leaking, 100, 200) > 2, "50 KiB lost with each run would be seen"


def test_failed_runs_are_listed_and_do_not_stop_the_rest(tmp_path):
    study = dummies.study(arms={"lora": {"method": "lora"}, "full": {"method": "full"}})
    progress = conduct(study, tmp_path, LocalEngine(2, do=dummies.pretend))
    assert len(progress.failed) == 3
    assert set(progress.failed.values()) == {"RuntimeError: out of memory"}
    assert len(progress.results) == 5
    (name, *_) = progress.failed
    assert "out of memory" in (tmp_path / f"{name}.log").read_text()
    again = Instantly()
    assert len(conduct(study, tmp_path, again).failed) == 3
    assert again.submitted == [], "not tried for ever"


def test_failures_of_removed_arms_and_rates_are_not_listed(tmp_path):
    both = {"lora": {"method": "lora"}, "full": {"method": "full"}}
    assert len(conduct(dummies.study(arms=both), tmp_path, Attempting()).failed) == 3
    assert len(so_far(dummies.study(arms=both, learning_rates=[1e-4, 1e-3]), tmp_path).failed) == 2
    without = dummies.study(arms={"lora": both["lora"]})
    assert so_far(without, tmp_path).failed == {}
    progress = conduct(without, tmp_path, Instantly())
    assert progress.failed == {}
    assert len(progress.results) == progress.total == 5
    assert len(so_far(dummies.study(arms=both), tmp_path).failed) == 3, "they are known when it is back"


def test_a_run_whose_process_was_terminated_is_open_at_the_next_start(tmp_path):
    """Of each arm it is the run with the best rate, without which another rate would be chosen."""
    with pytest.raises(nalora.NALoRAError, match=r"2 runs whose process was terminated"):
        conduct(dummies.study(), tmp_path, LocalEngine(2, do=stop_the_best_once))
    assert not (tmp_path / "dummy.failures.jsonl").exists()
    assert len(so_far(dummies.study(), tmp_path).results) == 4, "the others are done"
    again = Instantly()
    progress = conduct(dummies.study(), tmp_path, again)
    assert table(progress) == table(conduct(dummies.study(), tmp_path / "other", Instantly()))
    assert len({*again.submitted}) == 2 + 4, "those two, and the other seeds of what was chosen then"


def stop_the_best_once(job):
    """At SIGTERM a training run saves where it is; anything else just dies."""
    method = job.settings["method"]
    if job.settings["learning_rate"] == dummies.BEST[method]:
        if method == "lora":
            raise Interrupted("stopped after step 3")
        os.kill(os.getpid(), signal.SIGTERM)
    dummies.pretend(job)


@pytest.mark.slow
def test_a_worker_that_dies_takes_only_its_own_job(tmp_path):
    progress = conduct(dummies.study(), tmp_path, LocalEngine(2, do=die_with_one_seed))
    assert len(progress.failed) == 2
    assert all("its process died (exit code -9)" in error for error in progress.failed.values())
    assert len(progress.results) == 8


def die_with_one_seed(job):
    if job.settings["seed"] == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    dummies.pretend(job)


@pytest.mark.slow
def test_runs_that_do_not_fit_on_one_gpu_are_done_with_fewer_at_a_time(tmp_path):
    (tmp_path / "fit").write_text("1")
    engine = LocalEngine(3, do=share_a_small_gpu)
    progress = conduct(dummies.study(), tmp_path, engine)
    assert progress.failed == {}
    assert len(progress.results) == 10
    assert len(engine._workers) < 3


@pytest.mark.slow
def test_a_run_that_does_not_fit_alone_has_failed(tmp_path):
    (tmp_path / "fit").write_text("0")
    progress = conduct(dummies.study(), tmp_path, LocalEngine(2, do=share_a_small_gpu))
    assert len(progress.failed) == 6
    assert set(progress.failed.values()) == {"OutOfMemoryError: CUDA out of memory"}


def share_a_small_gpu(job):
    """As many runs as the file says fit; one more finds no memory."""
    here = Path(job.store)
    mine = here / f"{job.key}.running"
    mine.touch()
    try:
        time.sleep(0.1)
        if len(list(here.glob("*.running"))) > int((here / "fit").read_text()):
            raise torch.OutOfMemoryError("CUDA out of memory")
        dummies.pretend(job)
    finally:
        mine.unlink()


def test_a_disk_that_fills_up_ends_the_sitting_with_nothing_lost(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    free = iter([10 * 2**30] * 2 + [2**20] * 50)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, next(free)))
    with pytest.raises(nalora.NALoRAError, match="less than 1 GiB of room"):
        conduct(dummies.study(), tmp_path, Instantly())
    monkeypatch.undo()
    whole = conduct(dummies.study(), tmp_path / "other", Instantly())
    assert table(conduct(dummies.study(), tmp_path, Instantly())) == table(whole)


def out_of_room(number):
    return OSError(number, os.strerror(number))


def wrapped():
    try:
        raise out_of_room(errno.ENOSPC)
    except OSError as error:
        raise RuntimeError("could not save the checkpoint") from error


@pytest.mark.parametrize("how", ["ENOSPC", "EDQUOT", "wrapped", "safetensors", "log"])
def test_a_run_that_finds_the_disk_full_has_not_failed(tmp_path, monkeypatch, how):
    """The run with the best rate, without which another rate would be chosen; other running runs finish."""
    full = tmp_path / "full"

    def fill(job):
        if full.exists() and job.settings["learning_rate"] == dummies.BEST[job.settings["method"]]:
            if how == "wrapped":
                wrapped()
            if how == "safetensors":
                raise RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")
            if how == "log":  # not even what went wrong can be printed
                with open("/dev/full", "w") as device:
                    os.dup2(device.fileno(), 2)
                monkeypatch.setattr(sys, "stderr", os.fdopen(2, "w", buffering=1, closefd=False))
                raise RuntimeError("something else")
            raise out_of_room(getattr(errno, how))
        dummies.pretend(job)

    full.touch()
    engine = Attempting(fill)
    with pytest.raises(nalora.NALoRAError, match=r"the disk is full .*make room and start the same command again"):
        conduct(dummies.study(), tmp_path, engine)
    assert not (tmp_path / "dummy.failures.jsonl").exists()
    assert len(engine.submitted) == 4, "nothing new was started"
    assert len(so_far(dummies.study(), tmp_path).results) == 3, "what ran was let finish"
    full.unlink()
    whole = conduct(dummies.study(), tmp_path / "other", Instantly())
    assert table(conduct(dummies.study(), tmp_path, Attempting(fill))) == table(whole)


WITH_FAILURES = {"arms": {"lora": {"method": "lora"}, "full": {"method": "full"}}}


def test_a_failure_that_cannot_be_written_down_is_a_full_disk(tmp_path):
    failures = tmp_path / "dummy.failures.jsonl"
    failures.symlink_to("/dev/full")
    with pytest.raises(nalora.NALoRAError, match="the disk is full"):
        conduct(dummies.study(**WITH_FAILURES), tmp_path, Attempting())
    assert len(so_far(dummies.study(**WITH_FAILURES), tmp_path).results) == 5, "the other arm was let finish"
    failures.unlink()
    progress = conduct(dummies.study(**WITH_FAILURES), tmp_path, Attempting())
    assert (len(progress.failed), len(progress.results)) == (3, 5)


def test_half_a_row_of_a_failure_does_not_stay(tmp_path, monkeypatch):
    def fill(number):
        raise out_of_room(errno.ENOSPC)

    monkeypatch.setattr(os, "fsync", fill)
    with pytest.raises(nalora.NALoRAError, match="the disk is full"):
        conduct(dummies.study(**WITH_FAILURES), tmp_path, Attempting())
    monkeypatch.undo()
    assert (tmp_path / "dummy.failures.jsonl").read_text() == ""
    assert len(conduct(dummies.study(**WITH_FAILURES), tmp_path, Attempting()).failed) == 3


ON_A_SMALL_DISK = """
import subprocess
from pathlib import Path
import dummies, nalora
from nalora.studies import conduct
from nalora.studies.store import Store

def large(job):
    folder = Store(job.store).folder(job.key).path
    folder.mkdir(exist_ok=True)
    (folder / "adapter").write_bytes(bytes(300 * 1024))
    dummies.pretend(job)

study = dummies.study(arms={"full": {"method": "full"}, "lora": {"method": "lora"}})
conduct._ROOM = 0
mount = ["mount", "-t", "tmpfs", "none", "store", "-o"]
Path("store").mkdir()
subprocess.run([*mount, "size=1m"], check=True)
try:
    conduct.conduct(study, Path("store"), dummies.Attempting(large))
except nalora.NALoRAError as error:
    print(error)
subprocess.run([*mount, "remount,size=64m"], check=True)
progress = conduct.conduct(study, Path("store"), dummies.Attempting(large), retry_failed=True)
print(sorted(progress.results), {*progress.failed.values()})
"""


@pytest.mark.slow
@pytest.mark.skipif(
    subprocess.run(["unshare", "-Urm", "true"], capture_output=True, check=False).returncode != 0,
    reason="mounting a file system needs root or user namespaces",
)
def test_a_real_disk_that_is_really_full(tmp_path):
    code = ["unshare", "-Urm", sys.executable, "-c", ON_A_SMALL_DISK]
    done = subprocess.run(code, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert "the disk is full (OSError: [Errno 28] No space left on device" in first
    whole = conduct(dummies.study(**WITH_FAILURES), tmp_path / "other", Attempting())
    assert second == f"{sorted(whole.results)} { ({*whole.failed.values()}) }"


def environment():
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parent)])}


# Studies one after the other, each a process group of its own. Torch is imported once for all of them: a sitting
# begins at once and not after the 5 s that a spawned process takes.
SITTINGS = """
import multiprocessing, os, sys
from pathlib import Path
import torch
import dummies
from nalora.studies.conduct import conduct
from nalora.studies.engines import LocalEngine

fork = multiprocessing.get_context("fork")
multiprocessing.get_context = lambda method: fork
for ranks in sys.stdin:
    child = os.fork()
    if not child:
        code = 1
        try:
            os.setsid()
            print(os.getpid(), flush=True)
            study = dummies.study(over={"rank": list(range(1, int(ranks) + 1))})
            conduct(study, Path("store"), LocalEngine(2, do=dummies.pretend_in_steps))
            code = 0
        finally:
            os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.mark.parametrize("kills", [5, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_anywhere_it_ends_with_the_same_table(tmp_path, kills):
    """kill -9 somewhere in the next few runs: to the study alone, whose workers notice and end, or to all of them."""
    study, store = dummies.study(over={"rank": list(range(1, kills + 1))}), tmp_path / "store"
    chance, points = random.Random(kills), []
    command = [sys.executable, "-c", SITTINGS]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}

    def done():
        return len(list(store.glob("*/result.json")))

    with subprocess.Popen(command, cwd=tmp_path, env=environment(), **pipes) as sittings:
        for number in range(kills):
            wanted = done() + chance.randint(1, 3)
            sittings.stdin.write(f"{kills}\n")
            pid, latest = int(sittings.stdout.readline()), time.monotonic() + 60
            while done() < wanted:
                assert time.monotonic() < latest
                time.sleep(0.002)
            time.sleep(chance.uniform(0, 0.1))
            (os.kill, os.killpg)[number % 2](pid, signal.SIGKILL)
            points.append(done())
            assert sittings.stdout.readline() == f"{-signal.SIGKILL}\n", "it was still at it"
        sittings.stdin.write(f"{kills}\n")
        sittings.stdout.readline()
        assert sittings.stdout.readline() == "0\n"
        sittings.stdin.close()
    again = Instantly()
    killed, whole = conduct(study, store, again), conduct(study, tmp_path / "whole", Instantly())
    assert again.submitted == []
    assert table(killed) == table(whole)
    assert len(set(points)) == kills
    assert 0 < min(points) < max(points) < len(whole.results), "each time something was done and something left"
    assert {path.parent.name for path in store.glob("*/result.json")} == killed.results.keys()
    steps = {(Store(store).folder(key).path / "steps").read_text() for key in killed.results}
    assert steps == {"".join(f"{step}\n" for step in range(dummies.STEPS))}, "no step of any run was done twice"
