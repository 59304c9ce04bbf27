"""Conduct a study: start everything that can be done until nothing is left; after any interruption it continues."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from nalora.errors import NALoRAError, counted
from nalora.files.atomic import json_text
from nalora.studies.engines import Engine, refuse_without_locks
from nalora.studies.job import Job, log_of
from nalora.studies.outcome import describe_error, is_disk_full
from nalora.studies.schedule import Schedule
from nalora.studies.signals import StoppedBySignal, StopSignals
from nalora.studies.store import Result, Store
from nalora.studies.study import Study

# A run needs room for a checkpoint, an adapter and its outputs; with less than this none is started.
_ROOM = 2**30
_POLL_SECONDS = 2.0


@dataclass
class Progress:
    """The state of a study: results and errors by the key of the run, and the jobs that are running."""

    schedule: Schedule
    results: dict[str, Result]
    failed: dict[str, str] = field(default_factory=dict)
    running: dict[str, Job] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)
    done_before: int = 0
    total: int = 0
    stopping: bool = False

    @property
    def missing(self) -> list[Job]:
        """The runs that failed and without which an arm has no learning rate or no verdict."""
        lost = [job for cell in self.schedule.cells for job in self.schedule.lost(cell, self.results, self.failed)]
        return list({job.key: job for job in lost}.values())

    @property
    def done(self) -> int:
        """The number of finished runs."""
        return len(self.results)

    @property
    def seconds_left(self) -> float | None:
        """An estimate from the runs finished since the command was started; None before the first one."""
        finished = self.done - self.done_before
        elapsed = time.monotonic() - self.began
        return elapsed / finished * (self.total - self.done - len(self.failed)) if finished > 0 else None


def conduct(
    study: Study,
    store: Path,
    engine: Engine,
    *,
    retry_failed: bool = False,
    changed: Callable[[Progress], None] = lambda progress: None,
    schedule_of: type[Schedule] = Schedule,
) -> Progress:
    """Do everything that is not done; runs that fail are listed and do not stop the others.

    A run that crashes or is killed is started once more, from its last checkpoint. If it fails again, or if its error
    would occur again, it is missing: its arm has no learning rate or no verdict without it.

    Args:
        study: what is compared.
        store: the folder of all runs, which every worker can reach.
        engine: where the runs are computed; it is closed at the end.
        retry_failed: whether runs that failed in an earlier command are tried again.
        changed: called whenever something has started or ended.
        schedule_of: decides which runs the study needs.

    Raises:
        NALoRAError: the store's disk is full; what is running is finished first, and nothing is lost. Or a worker was
            terminated; everything else is done, and its run continues at the next start.
        StoppedBySignal: SIGTERM or SIGHUP; the workers have ended, each with a checkpoint of its run.
    """
    # Workers may be in another folder, and unfinished runs must be found under the name they were started with.
    store = store.absolute()
    store.mkdir(parents=True, exist_ok=True)
    refuse_without_locks(store)
    progress = _load(schedule_of(study, str(store)), retry_failed)
    schedule = progress.schedule
    full, terminated, repeated = "", set[str](), set[str]()
    with StopSignals() as signals:
        try:
            while True:
                if shutil.disk_usage(store).free < _ROOM:
                    full = full or "less than 1 GiB of room on its disk"
                busy = {*progress.running, *terminated}
                jobs = [job for job in schedule.open_jobs(progress.results, progress.failed) if job.key not in busy]
                progress.total = schedule.total(progress.results)
                while jobs and engine.has_room() and not full and signals.received is None:
                    job = jobs.pop(0)
                    engine.submit(job)
                    progress.running[job.key] = job
                changed(progress)
                if signals.received is not None:
                    raise StoppedBySignal(signals.received)
                if not progress.running:
                    break
                for outcome in engine.wait(_POLL_SECONDS):
                    job = progress.running.pop(outcome.key)
                    if outcome.out_of_gpu_memory and engine.reduce_sharing(outcome.key):
                        continue  # not its fault: it is started again with fewer runs on the GPU
                    result = Store(store).result(job.key, job.test_limit)
                    complete = result is not None and result.has_all(job.parts)
                    if outcome.disk_full:
                        full = full or str(outcome.error)
                    elif outcome.terminated:
                        terminated.add(job.key)
                    elif result is not None and complete and (outcome.error is None or result.diverged):
                        progress.results[job.key] = result
                    elif outcome.may_be_repeated and job.key not in repeated:
                        repeated.add(job.key)
                    else:
                        error = outcome.error or "it ended without a result"
                        try:
                            _record_failure(_failures_file(study, store), job, error)
                            progress.failed[job.key] = error
                        except OSError as problem:
                            if not is_disk_full(problem):
                                raise
                            full = describe_error(problem)
        except KeyboardInterrupt:
            progress.stopping = True
            changed(progress)
            raise
        finally:
            engine.close()
    if full and schedule.open_jobs(progress.results, progress.failed):
        raise NALoRAError(
            str(store),
            found=full,
            expected="room for the runs that are left",
            fix="make room and start the same command again; finished runs are kept",
        )
    if terminated:
        raise NALoRAError(
            str(store),
            found=f"{counted(len(terminated), 'run')} whose process was terminated ({', '.join(sorted(terminated))})",
            expected="runs that finish",
            fix="start the same command again; they continue from their last checkpoint",
        )
    return progress


def so_far(study: Study, store: Path, schedule_of: type[Schedule] = Schedule) -> Progress:
    """Return the progress of a study from its store, including runs of which not all parts have been evaluated."""
    progress = _load(schedule_of(study, str(store)))
    for job in progress.schedule.open_jobs(progress.results, {}):
        if (result := Store(store).result(job.key, job.test_limit)) is not None:
            progress.results[job.key] = result
    return progress


def _load(schedule: Schedule, retry_failed: bool = False) -> Progress:
    """Return the progress of a study with its completely evaluated runs."""
    study, store = schedule.study, Path(schedule.store)
    failed = {} if retry_failed else _of_this_study(schedule, _read_failures(_failures_file(study, store)))
    progress = Progress(schedule, {}, failed)
    previous = -1
    while progress.done > previous:  # results may show that further runs belong to the study
        previous = progress.done
        for job in schedule.open_jobs(progress.results, {}):
            result = Store(store).result(job.key, job.test_limit)
            if result is not None and result.has_all(job.parts):
                progress.results[job.key] = result
                failed.pop(job.key, None)
    progress.done_before = progress.done
    progress.total = schedule.total(progress.results)
    return progress


def _of_this_study(schedule: Schedule, failed: dict[str, str]) -> dict[str, str]:
    """Leave out arms, rates and seeds that the study had when they failed, and does not have any more."""
    if not failed:
        return {}  # saves the computation of thousands of keys
    possible = {
        schedule.job(cell, rate, seed).key
        for cell in schedule.cells
        for rate in cell.arm.learning_rates
        for seed in {*cell.arm.seeds, *schedule.study.screening_seeds}
    }
    return {key: error for key, error in failed.items() if key in possible}


def _failures_file(study: Study, store: Path) -> Path:
    """Return the file that lists the runs that failed, so that they are not tried again and again."""
    return store / f"{study.name}.failures.jsonl"


def _read_failures(path: Path) -> dict[str, str]:
    """Return the errors of failed runs by key; damaged lines are skipped."""
    failed = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else ():
        with contextlib.suppress(ValueError, TypeError, KeyError):
            row = json.loads(line)
            failed[str(row["key"])] = str(row["error"])
    return failed


def _record_failure(path: Path, job: Job, error: str) -> None:
    row = {"key": job.key, "label": job.label, "error": error, "log": str(log_of(job))}
    size = path.stat().st_size if path.is_file() else 0
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json_text(row) + "\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        # Half a row would spoil the next one, which would start on the same line.
        with contextlib.suppress(OSError):
            os.truncate(path, size)
        raise
