"""What is left to do in a study, as a pure function of the results so far: screening, then the chosen runs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

from nalora.studies.job import Job
from nalora.studies.store import ANSWERS, TEST, VALIDATION, Result, key
from nalora.studies.study import Arm, Study

Results = Mapping[str, Result]  # by the key of the run
_NO_RESULTS: Results = MappingProxyType({})


class Cell(NamedTuple):
    """One arm under one combination of settings; the name is unique."""

    settings: tuple[tuple[str, Any], ...]
    arm: Arm
    name: str


class Schedule:
    """The runs of a study; each key is computed once."""

    def __init__(self, study: Study, store: str) -> None:
        self.study, self.store = study, store
        self.cells = [
            Cell(tuple(combination.items()), arm, ", ".join([arm.name, *(f"{k} {v}" for k, v in combination.items())]))
            for combination in study.combinations()
            for arm in study.arms_in(combination)
        ]
        self._jobs: dict[tuple[str, float, int, tuple[str, ...]], Job] = {}

    def job(self, cell: Cell, rate: float, seed: int, *parts: str) -> Job:
        """Return the run of this cell with this learning rate and seed, and the parts to evaluate."""
        index = (cell.name, rate, seed, parts)
        if index not in self._jobs:
            if parts:
                self._jobs[index] = replace(self.job(cell, rate, seed), parts=parts)
            else:
                study, label = self.study, f"{cell.name}, lr {rate:g}, seed {seed}"
                run = study.run(dict(cell.settings), cell.arm, rate, seed)
                settings = {name: value for name, value in run.to_dict().items() if name != "output"}
                job = Job(key(run), settings, (), self.store, label, study.test_limit, study.max_batch_tokens)
                self._jobs[index] = job
        return self._jobs[index]

    def screening(self, cell: Cell, results: Results = _NO_RESULTS) -> list[Job]:
        """Return the runs by which the learning rate is chosen; none if there is only one learning rate.

        Runs that `drop_rates_worse_than` makes unnecessary, given the results, are left out.
        """
        if len(cell.arm.learning_rates) == 1:
            return []
        parts = (VALIDATION, TEST, ANSWERS) if self.study.generate == "all" else (VALIDATION,)
        return [
            self.job(cell, rate, seed, *parts)
            for rate in cell.arm.learning_rates
            for seed in self._screening_seeds(cell, rate, results)
        ]

    def _screening_seeds(self, cell: Cell, rate: float, results: Results) -> tuple[int, ...]:
        dropped = self.dropped_rates(cell, results) or ()
        return self.study.screening_seeds[: 1 if rate in dropped else None]

    def screening_keys(self, cell: Cell, rate: float, results: Results) -> list[str]:
        """Return the keys of the runs whose validation losses count for this learning rate."""
        return [self.job(cell, rate, seed).key for seed in self._screening_seeds(cell, rate, results)]

    def dropped_rates(self, cell: Cell, results: Results) -> tuple[float, ...] | None:
        """Return the learning rates that are trained with the first screening seed only.

        None as long as the loss of a learning rate with that seed is unknown. A study without `drop_rates_worse_than`
        drops none.
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

    def screened(self, cell: Cell, results: Results) -> dict[float, float | None]:
        """Return the mean validation loss of every learning rate, None as long as one of its runs is missing.

        A run that diverged has an infinite loss. A run that failed has none: its learning rate may be the best. A
        dropped learning rate has its loss with the first screening seed.
        """
        means: dict[float, float | None] = {}
        for rate in cell.arm.learning_rates:
            keys = self.screening_keys(cell, rate, results)
            losses = [results[key].losses[VALIDATION] for key in keys if is_screened(key, results)]
            means[rate] = statistics.fmean(losses) if len(losses) == len(keys) else None
        return means

    def chosen_rate(self, cell: Cell, results: Results) -> float | None:
        """Return the learning rate with the lowest validation loss; None if a run is missing or all rates diverged."""
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

    def diverged(self, cell: Cell, results: Results) -> bool:
        """Whether every learning rate of the arm diverged, so that none can be chosen."""
        losses = self.screened(cell, results).values()
        return len(cell.arm.learning_rates) > 1 and all(loss == math.inf for loss in losses)

    def final(self, cell: Cell, rate: float) -> list[Job]:
        """Return the runs that are compared: the chosen learning rate with every seed."""
        parts = (VALIDATION, TEST) if self.study.generate == "none" else (VALIDATION, TEST, ANSWERS)
        return [self.job(cell, rate, seed, *parts) for seed in cell.arm.seeds]

    def needed(self, cell: Cell, results: Results) -> list[Job]:
        """Return all runs of the arm that are known to be needed: screening and, once a rate is chosen, final ones."""
        rate = self.chosen_rate(cell, results)
        return [*self.screening(cell, results), *(self.final(cell, rate) if rate is not None else [])]

    def lost(self, cell: Cell, results: Results, failed: Collection[str]) -> list[Job]:
        """Return the runs that the arm needs and that failed, each once."""
        needed = self.needed(cell, results)
        return list({job.key: job for job in needed if job.key in failed and not _is_done(job, results)}.values())

    def open_jobs(self, results: Results, failed: Collection[str]) -> list[Job]:
        """Return everything that can be done now and is not done, each run once.

        Arm by arm: a study that is stopped early has complete arms, and the weights of an arm's chosen runs are still
        in the store when its test set is evaluated. As long as it is undecided which rates are dropped, screening
        runs have the first seed only.
        """
        jobs: dict[str, Job] = {}
        for cell in self.cells:
            undecided = self.dropped_rates(cell, results) is None
            for job in self.needed(cell, results):
                if undecided and job.settings["seed"] != self.study.screening_seeds[0]:
                    continue
                if job.key not in failed and not _is_done(job, results):
                    same = jobs.get(job.key, job)
                    jobs[job.key] = replace(same, parts=tuple(dict.fromkeys((*same.parts, *job.parts))))
        return list(jobs.values())

    def total(self, results: Results) -> int:
        """Return the number of runs in the study, including those whose learning rate is not chosen yet."""
        keys: set[str] = set()
        unknown = 0
        for cell in self.cells:
            keys |= {job.key for job in self.needed(cell, results)}
            if self.chosen_rate(cell, results) is None:
                # Whichever rate is chosen, its runs with screening seeds are among the screening runs.
                unknown += len(set(cell.arm.seeds) - set(self.study.screening_seeds))
        return len(keys) + unknown


def _is_done(job: Job, results: Results) -> bool:
    return job.key in results and results[job.key].has_all(job.parts)


def is_screened(key: str, results: Results) -> bool:
    """Whether a run's validation loss is known."""
    return key in results and results[key].has(VALIDATION)
