"""A study is conducted to its end whatever happens on the way: kills, failures, a full disk."""

from __future__ import annotations

import functools
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import dummies
import pytest
import torch

import nalora
from nalora.studies.conduct import conduct, so_far
from nalora.studies.engines import Ended, LocalEngine
from nalora.studies.store import TEST, Store


class Instantly:
    """An engine that has done a job before it is asked."""

    def __init__(self, do=dummies.pretend):
        self.do, self.ended, self.submitted = do, [], []

    def has_room(self):
        return len(self.ended) < 4

    def submit(self, job):
        self.submitted.append(job.key)
        self.do(job)
        self.ended.append(Ended(job.key, None))

    def wait(self, seconds):
        ended, self.ended = self.ended, []
        return ended

    def close(self):
        pass


def table(progress):
    return {key: (result.losses, result.measures) for key, result in sorted(progress.results.items())}


def test_a_study_comes_to_its_end_and_is_never_repeated(tmp_path):
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


def test_what_was_asked_in_part_is_known_so_far_and_still_to_be_done(tmp_path):
    conduct(dummies.study(ask="none"), tmp_path, Instantly())
    known = so_far(dummies.study(), tmp_path)
    finals = [job for cell in known.schedule.cells for job in known.schedule.final(cell, dummies.BEST[cell.arm.name])]
    assert {job.key for job in finals} <= {*known.results}
    assert all(known.results[job.key].losses and not known.results[job.key].measures for job in finals)
    engine = Instantly()
    progress = conduct(dummies.study(), tmp_path, engine)
    assert {job.key for job in finals} == {*engine.submitted}
    assert all(progress.results[job.key].measures for job in finals)


def test_500_runs_take_less_than_50_ms_each_and_no_more_memory(tmp_path):
    study = dummies.study(over={"rank": list(range(1, 51))})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.process_time()
    progress = conduct(study, tmp_path, Instantly())
    seconds = time.process_time() - began
    assert len(progress.results) == progress.total == 500
    assert seconds / 500 < 0.05
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024


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


def test_a_worker_that_dies_takes_only_its_own_job(tmp_path):
    progress = conduct(dummies.study(), tmp_path, LocalEngine(2, do=die_with_one_seed))
    assert len(progress.failed) == 2
    assert all("its process died (exit code -9)" in error for error in progress.failed.values())
    assert len(progress.results) == 8


def die_with_one_seed(job):
    if job.settings["seed"] == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    dummies.pretend(job)


def test_runs_that_do_not_fit_beside_each_other_are_done_beside_fewer(tmp_path):
    (tmp_path / "fit").write_text("1")
    engine = LocalEngine(3, do=share_a_small_gpu)
    progress = conduct(dummies.study(), tmp_path, engine)
    assert progress.failed == {}
    assert len(progress.results) == 10
    assert len(engine._workers) < 3


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


SCRIPT = """
import dummies
from pathlib import Path
from nalora.studies.conduct import conduct, so_far
from nalora.studies.engines import LocalEngine
if __name__ == "__main__":
    conduct(dummies.study(over={"rank": [4, 8]}), Path("store"), LocalEngine(2, do=dummies.pretend_slowly))
"""


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_anywhere_it_ends_with_the_same_table(tmp_path, kills):
    """kill -9 to the study at random points; its workers notice and end; started again it goes on."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    chance = random.Random(0)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parent)])}
    start = functools.partial(subprocess.Popen, [sys.executable, str(script)], cwd=tmp_path, env=environment)
    for _ in range(kills):
        process = start()
        time.sleep(chance.uniform(4.0, 9.0))
        process.kill()
        process.wait()
    assert start().wait(timeout=300) == 0
    killed = conduct(dummies.study(over={"rank": [4, 8]}), tmp_path / "store", Instantly())
    whole = conduct(dummies.study(over={"rank": [4, 8]}), tmp_path / "whole", Instantly())
    assert table(killed) == table(whole)
    trained = [Store(tmp_path / "store").folder(key).path / "trained" for key in killed.results]
    assert all(each.read_text() == "once\n" for each in trained), "no run was done twice"
