"""Conduct a study: keep the engine busy with what can be done, until nothing is left; stopped anywhere, it goes on."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from nalora.errors import NALoRAError
from nalora.files.atomic import json_text
from nalora.studies.ended import is_disk_full, told
from nalora.studies.engines import Engine, refuse_without_locks
from nalora.studies.job import Job, log_of
from nalora.studies.schedule import Schedule
from nalora.studies.signals import StoppedBySignal, StopSignals
from nalora.studies.store import Result, Store
from nalora.studies.study import Study

# A run is a checkpoint, an adapter and its outputs; below this much room none is started.
_ROOM = 2**30
_LOOK_AGAIN = 2.0


@dataclass
class Progress:
    """What a live table shows: results and failures by key, and what runs now."""

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
        """Runs that failed and without which an arm has no learning rate or no verdict."""
        lost = [job for cell in self.schedule.cells for job in self.schedule.lost(cell, self.results, self.failed)]
        return list({job.key: job for job in lost}.values())

    @property
    def done(self) -> int:
        """Runs of the study that are finished."""
        return len(self.results)

    @property
    def seconds_left(self) -> float | None:
        """By the pace of this sitting, None before its first run has ended."""
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
) -> Progress:
    """Do everything that is not done; failed runs are listed and do not stop the rest.

    A run that crashes or is killed is started once more, from its last checkpoint. If it fails again, or if its error
    cannot go away by itself, it is missing: its arm has no learning rate and no verdict until it is there.

    Args:
        study: what is compared.
        store: the folder of all runs, which every worker can reach.
        engine: where the runs are computed; it is closed at the end.
        retry_failed: whether runs that failed in an earlier sitting are tried again.
        changed: hears whenever something has started or ended.

    Raises:
        NALoRAError: the store's disk is full: what runs is let finish, nothing is lost; or a worker was told to end:
            everything else is done, and its run is open at the next start.
        StoppedBySignal: SIGTERM or SIGHUP; the workers have ended, each with a checkpoint of its run.
    """
    # Workers may be in another folder, and half-done runs must be found under the name they were begun with.
    store = store.absolute()
    store.mkdir(parents=True, exist_ok=True)
    refuse_without_locks(store)
    failures = _Failures(store / f"{study.name}.failures.jsonl")
    runs = Store(store)
    progress = _finished(study, store, retry_failed)
    schedule = progress.schedule
    full, stopped, repeated = "", set[str](), set[str]()
    with StopSignals() as signals:
        try:
            while True:
                if shutil.disk_usage(store).free < _ROOM:
                    full = full or "less than 1 GiB of room on its disk"
                busy = {*progress.running, *stopped}
                waiting = [j for j in schedule.open_jobs(progress.results, progress.failed) if j.key not in busy]
                progress.total = schedule.total(progress.results)
                while waiting and engine.has_room() and not full and signals.received is None:
                    job = waiting.pop(0)
                    engine.submit(job)
                    progress.running[job.key] = job
                changed(progress)
                if signals.received is not None:
                    raise StoppedBySignal(signals.received)
                if not progress.running:
                    break
                for ended in engine.wait(_LOOK_AGAIN):
                    job = progress.running.pop(ended.key)
                    if ended.too_crowded and engine.give_way(ended.key):
                        continue  # not its fault: it waits for a place beside fewer others
                    result = runs.result(ended.key, job.ask_limit)
                    whole = result is not None and all(result.has(part) for part in job.parts)
                    if ended.disk_full:
                        full = full or str(ended.error)
                    elif ended.told_to_end:
                        stopped.add(ended.key)
                    elif result is not None and whole and (ended.error is None or result.diverged):
                        progress.results[ended.key] = result
                    elif ended.may_be_repeated and ended.key not in repeated:
                        repeated.add(ended.key)
                    else:
                        full = _write_down(failures, progress, job, ended.error or "it ended without a result") or full
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
            fix="make room and start the study again; finished runs are kept",
        )
    if stopped:
        raise NALoRAError(
            str(store),
            found=f"that the process of {len(stopped)} run(s) was told to end ({', '.join(sorted(stopped))})",
            expected="runs that come to their end",
            fix="start the study again; it goes on where they were",
        )
    return progress


def _write_down(failures: _Failures, progress: Progress, job: Job, error: str) -> str:
    """The run failed, unless the disk has no room even for that, which is what is given then."""
    try:
        failures.add(job, error)
    except OSError as problem:
        if not is_disk_full(problem):
            raise
        return told(problem)
    progress.failed[job.key] = error
    return ""


def so_far(study: Study, store: Path) -> Progress:
    """What a store holds of a study, runs included of which not everything was asked yet."""
    progress, runs = _finished(study, store), Store(store)
    for job in progress.schedule.open_jobs(progress.results, {}):
        if (result := runs.result(job.key, job.ask_limit)) is not None:
            progress.results[job.key] = result
    return progress


def _finished(study: Study, store: Path, retry_failed: bool = False) -> Progress:
    """The runs of which everything was asked."""
    schedule = Schedule(study, str(store))
    failed = {} if retry_failed else _Failures(store / f"{study.name}.failures.jsonl").read()
    progress = Progress(schedule, {}, _of_this_study(schedule, failed))
    _find_known(progress, Store(store))
    progress.done_before = progress.done
    progress.total = progress.schedule.total(progress.results)
    return progress


def _of_this_study(schedule: Schedule, failed: dict[str, str]) -> dict[str, str]:
    """Without those of arms, rates and seeds that the study had when they failed, and has no more."""
    if not failed:
        return {}  # thousands of keys would be worked out for nothing
    possible = {
        schedule.job(cell, rate, seed).key
        for cell in schedule.cells
        for rate in cell.arm.learning_rates
        for seed in {*cell.arm.seeds, *schedule.study.screening_seeds}
    }
    return {key: error for key, error in failed.items() if key in possible}


def _find_known(progress: Progress, runs: Store) -> None:
    """Results that are there already; finding some may show that others belong to the study."""
    while True:
        before = progress.done
        for job in progress.schedule.open_jobs(progress.results, {}):
            result = runs.result(job.key, job.ask_limit)
            if result is not None and all(result.has(part) for part in job.parts):
                progress.results[job.key] = result
                progress.failed.pop(job.key, None)
        if progress.done == before:
            return


class _Failures:
    """Which runs failed and how, kept so that a study that is started again does not try them for ever."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> dict[str, str]:
        if not self.path.is_file():
            return {}
        rows = []
        for line in self.path.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                rows.append(json.loads(line))
        whole = [row for row in rows if isinstance(row, dict) and row.keys() >= {"key", "error"}]
        return {str(row["key"]): str(row["error"]) for row in whole}

    def add(self, job: Job, error: str) -> None:
        row = {"key": job.key, "label": job.label, "error": error, "log": str(log_of(job))}
        size = self.path.stat().st_size if self.path.is_file() else 0
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json_text(row) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            # Half a row would spoil the next one, which begins on its line.
            with contextlib.suppress(OSError):
                os.truncate(self.path, size)
            raise
