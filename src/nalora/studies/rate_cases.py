"""The cases of a search for learning rates, from a study's runs: final losses, and measures of the first steps."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from nalora.runs.folder import MOVEMENT, read_jsonl
from nalora.studies.rate_rules import PLANS, Case
from nalora.studies.schedule import Cell, Results, Schedule
from nalora.studies.store import Store

# Losses and gradient norms of single steps are noisy: those of this many steps are combined. Where a run does not log
# every step, a row has the mean loss since the row before.
WINDOW = 10


def early_measures(rows: Sequence[Mapping[str, Any]], steps: int) -> dict[str, float]:
    """Return the measures of a run's first `steps` steps, by ``NAME@STEPS``; empty if it has no row of that step.

    loss: the mean over the rows of the last ten of these steps. rate_times_gradient: their median gradient norm times
    the run's learning rate, which is the highest one so far. gradient_growth: that norm over the median of the first
    ten steps.
    The others are the recorded movement since the start.

    Args:
        rows: of metrics.jsonl; studies of rates have one for every step.
        steps: number of steps that may be seen.
    """
    seen = [row for row in rows if row.get("step", math.inf) <= steps]
    if not seen or seen[-1]["step"] != steps:
        return {}
    last = [row for row in seen if row["step"] > steps - WINDOW]
    first = [row for row in seen if row["step"] <= WINDOW]
    measures = {"loss": _mean(last, "loss")}
    norm, start = _median(last, "grad_norm"), _median(first, "grad_norm")
    if norm is not None and start:
        measures["rate_times_gradient"] = norm * max(float(row["learning_rate"]) for row in seen)
        measures["gradient_growth"] = norm / start
    measures |= {name.removeprefix(MOVEMENT): value for name, value in seen[-1].items() if name.startswith(MOVEMENT)}
    return {
        f"{name}@{steps}": float(value)
        for name, value in measures.items()
        if value is not None and math.isfinite(float(value))
    }


def cases_of(
    schedule: Schedule,
    results: Results,
    range_tests: Schedule | None = None,
    *,
    cells: Sequence[Cell] | None = None,
    seed: int | None = None,
) -> list[Case]:
    """Return a case for every arm and combination of a study whose rates have all been trained.

    The final loss of a rate is its mean over the screening seeds; a dropped rate has that of the first seed. Measures
    of the first steps are those of one seed, as a user would have them.

    Args:
        schedule: of the study.
        results: of its runs.
        range_tests: of the study with the range test of every arm and combination, if it was run.
        cells: the arms and combinations that may be looked at (default: all).
        seed: whose first steps are seen (default: the first screening seed).
    """
    seed = schedule.study.screening_seeds[0] if seed is None else seed
    tests = {cell.name: cell for cell in range_tests.cells} if range_tests else {}
    cases = []
    for cell in schedule.cells if cells is None else cells:
        losses = {rate: loss for rate, loss in schedule.screened(cell, results).items() if loss is not None}
        if len(losses) < len(cell.arm.learning_rates):
            continue
        early: dict[float, dict[str, float]] = {}
        for rate in losses:
            rows = _rows(schedule, cell, rate, seed)
            early[rate] = {name: value for steps, _ in PLANS for name, value in early_measures(rows, steps).items()}
        curve: list[tuple[float, float]] = []
        if range_tests and cell.name in tests:
            test = tests[cell.name]
            rows = _rows(range_tests, test, test.arm.learning_rates[0], test.arm.seeds[0])
            curve = [(row["learning_rate"], row["loss"]) for row in rows if _is_finite(row.get("loss"))]
        # The number of steps is that of the longest log: runs that diverged ended early.
        steps = max(_last_step(schedule, cell, rate, seed) for rate in losses)
        cases.append(Case(cell.name, steps, losses, early, curve))
    return cases


def _rows(schedule: Schedule, cell: Cell, rate: float, seed: int) -> list[dict[str, Any]]:
    return read_jsonl(Store(schedule.store).folder(schedule.job(cell, rate, seed).key).metrics)


def _last_step(schedule: Schedule, cell: Cell, rate: float, seed: int) -> int:
    return max((int(row.get("step", 0)) for row in _rows(schedule, cell, rate, seed)), default=0)


def _mean(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [float(row[name]) for row in rows if _is_finite(row.get(name))]
    return statistics.fmean(values) if len(values) == len(rows) else None


def _median(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [float(row[name]) for row in rows if _is_finite(row.get(name))]
    return statistics.median(values) if values else None


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
