"""What of a study is to be done next, from what is known: screening first, then the chosen runs; a pure function."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

from nalora.studies.job import Job
from nalora.studies.store import ANSWERS, TEST, VALIDATION, Result, key
from nalora.studies.study import Arm, Study

_NOTHING: Mapping[str, Result] = MappingProxyType({})


class Cell(NamedTuple):
    """One arm under one combination of settings."""

    settings: tuple[tuple[str, Any], ...]
    arm: Arm

    name: str  # for people, and its own


class Schedule:
    """A study's runs, their keys worked out once."""

    def __init__(self, study: Study, store: str) -> None:
        self.study, self.store = study, store
        self.cells = [
            Cell(tuple(cell.items()), arm, ", ".join([arm.name, *(f"{name} {value}" for name, value in cell.items())]))
            for cell in study.cells()
            for arm in study.arms_in(cell)
        ]
        self._jobs: dict[tuple[str, float, int, tuple[str, ...]], Job] = {}

    def job(self, cell: Cell, rate: float, seed: int, *parts: str) -> Job:
        """The run of this cell at this learning rate with this seed, and what is asked of it."""
        place = (cell.name, rate, seed, parts)
        if place not in self._jobs:
            if parts:
                self._jobs[place] = replace(self.job(cell, rate, seed), parts=parts)
            else:
                run = self.study.run(dict(cell.settings), cell.arm, rate, seed)
                settings = {name: value for name, value in run.to_dict().items() if name != "output"}
                label = f"{cell.name}, lr {rate:g}, seed {seed}"
                self._jobs[place] = Job(
                    key(run), settings, (), self.store, label, self.study.ask_limit, self.study.ask_tokens
                )
        return self._jobs[place]

    def screening(self, cell: Cell, results: Mapping[str, Result] = _NOTHING) -> list[Job]:
        """The runs that a learning rate is chosen by; none where there is nothing to choose.

        Without those that `drop_rates_worse_than` has made unnecessary, judged by the results.
        """
        rates, (first, *others) = cell.arm.learning_rates, self.study.screening_seeds
        if len(rates) == 1:
            return []
        parts = (VALIDATION, TEST, ANSWERS) if self.study.ask == "all" else (VALIDATION,)
        dropped = self.dropped_rates(cell, results) or ()
        return [
            self.job(cell, rate, seed, *parts)
            for rate in rates
            for seed in (first, *(() if rate in dropped else others))
        ]

    def dropped_rates(self, cell: Cell, results: Mapping[str, Result]) -> tuple[float, ...] | None:
        """Learning rates that are trained with the first screening seed alone; None while that is undecided.

        Undecided means that the loss of a learning rate with the first screening seed is not known yet. A study without
        `drop_rates_worse_than` drops none.
        """
        margin, rates = self.study.drop_rates_worse_than, cell.arm.learning_rates
        if margin is None or len(rates) == 1 or len(self.study.screening_seeds) == 1:
            return ()
        keys = {rate: self.job(cell, rate, self.study.screening_seeds[0]).key for rate in rates}
        if not all(is_screened(key, results) for key in keys.values()):
            return None
        losses = {rate: results[key].losses[VALIDATION] for rate, key in keys.items()}
        best = min((loss for loss in losses.values() if math.isfinite(loss)), default=math.inf)
        return tuple(rate for rate, loss in losses.items() if loss > best + margin)

    def screened(self, cell: Cell, results: Mapping[str, Result]) -> dict[float, float | None]:
        """The mean validation loss of every learning rate, None while one of its runs is missing.

        A run that diverged has an infinite loss. One that crashed or was killed has none: its learning rate may be the
        best. Of a dropped rate it is the loss with the first screening seed.
        """
        means: dict[float, float | None] = {}
        for rate in cell.arm.learning_rates:
            names = self.screening_keys(cell, rate, results)
            losses = [results[name].losses[VALIDATION] for name in names if is_screened(name, results)]
            means[rate] = statistics.fmean(losses) if len(losses) == len(names) else None
        return means

    def screening_keys(self, cell: Cell, rate: float, results: Mapping[str, Result]) -> list[str]:
        """The runs that this learning rate is judged by."""
        dropped = self.dropped_rates(cell, results) or ()
        seeds = self.study.screening_seeds[: 1 if rate in dropped else None]
        return [self.job(cell, rate, seed).key for seed in seeds]

    def chosen_rate(self, cell: Cell, results: Mapping[str, Result]) -> float | None:
        """The learning rate with the lowest validation loss; None while a run is missing, or if all rates diverged."""
        if len(cell.arm.learning_rates) == 1:
            return cell.arm.learning_rates[0]
        dropped = self.dropped_rates(cell, results)
        if dropped is None:
            return None
        means = {rate: loss for rate, loss in self.screened(cell, results).items() if rate not in dropped}
        known = {rate: loss for rate, loss in means.items() if loss is not None}
        if len(known) < len(means):
            return None
        best = min(known, key=lambda rate: known[rate])
        return best if math.isfinite(known[best]) else None

    def diverged(self, cell: Cell, results: Mapping[str, Result]) -> bool:
        """Whether every learning rate of the arm diverged, so that there is none to choose."""
        losses = self.screened(cell, results).values()
        return len(cell.arm.learning_rates) > 1 and all(loss == math.inf for loss in losses)

    def lost(self, cell: Cell, results: Mapping[str, Result], failed: Mapping[str, str]) -> list[Job]:
        """Runs that the arm's answer needs and that failed, each once."""
        rate = self.chosen_rate(cell, results)
        needed = [*self.screening(cell, results), *(self.final(cell, rate) if rate is not None else [])]
        return list({job.key: job for job in needed if job.key in failed and not _is_done(job, results)}.values())

    def final(self, cell: Cell, rate: float) -> list[Job]:
        """The runs that are compared: the chosen learning rate with every seed."""
        parts = (VALIDATION, TEST) if self.study.ask == "none" else (VALIDATION, TEST, ANSWERS)
        return [self.job(cell, rate, seed, *parts) for seed in cell.arm.seeds]

    def open_jobs(self, results: Mapping[str, Result], failed: Mapping[str, str]) -> list[Job]:
        """Everything that can be done now and is not done, each run once.

        Arm by arm: a study that is stopped early has complete arms, and the weights of an arm's chosen runs are still
        in the store when its test set is evaluated.
        """
        wanted: list[Job] = []
        for cell in self.cells:
            wanted += self._screening_now(cell, results)
            if (rate := self.chosen_rate(cell, results)) is not None:
                wanted += self.final(cell, rate)
        jobs: dict[str, Job] = {}
        for job in wanted:
            if job.key not in failed and not _is_done(job, results):
                twin = jobs.get(job.key, job)
                parts = tuple(dict.fromkeys((*twin.parts, *job.parts)))
                jobs[job.key] = twin if parts == twin.parts else replace(twin, parts=parts)
        return list(jobs.values())

    def _screening_now(self, cell: Cell, results: Mapping[str, Result]) -> list[Job]:
        """The screening runs that are certainly needed: with the first seed alone until rates have been dropped."""
        jobs = self.screening(cell, results)
        if self.dropped_rates(cell, results) is not None:
            return jobs
        return [job for job in jobs if job.settings["seed"] == self.study.screening_seeds[0]]

    def total(self, results: Mapping[str, Result]) -> int:
        """How many runs the study has in all, those included whose learning rate is not chosen yet."""
        known: set[str] = set()
        unknown = 0
        for cell in self.cells:
            known |= {job.key for job in self.screening(cell, results)}
            rate = self.chosen_rate(cell, results)
            if rate is not None:
                known |= {job.key for job in self.final(cell, rate)}
            else:
                # One of them is a screening run, at whatever rate that will be.
                unknown += len(set(cell.arm.seeds) - set(self.study.screening_seeds))
        return len(known) + unknown


def _is_done(job: Job, results: Mapping[str, Result]) -> bool:
    known = results.get(job.key)
    return known is not None and all(known.has(part) for part in job.parts)


def is_screened(key: str, results: Mapping[str, Result]) -> bool:
    """Whether a run's validation loss is known."""
    return key in results and results[key].has(VALIDATION)
