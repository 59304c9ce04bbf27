"""What every engine's workers keep to: one process at a run, and no blame for a process that was told to end."""

from __future__ import annotations

import fcntl

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
