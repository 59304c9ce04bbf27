"""Which comparisons of a study are not made, and why: an arm diverged, or a run of it is missing."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from nalora.errors import counted
from nalora.report.study_answer import LostRun

Pair = tuple[str, str]  # an arm, and what it is compared with


def diverged_seeds(by_seed: Mapping[int, float]) -> int:
    """The number of seeds whose result is no finite number."""
    return sum(not math.isfinite(value) for value in by_seed.values())


def diverged_with_a_seed(values: Mapping[str, Mapping[int, float]], pairs: Sequence[Pair], measure: str) -> list[str]:
    """A sentence for every pair of which one diverged with some of the seeds."""
    sentences = []
    for arm, baseline in pairs:
        if not values.keys() >= {arm, baseline}:
            continue
        bad = [name for name in (arm, baseline) if diverged_seeds(values[name])]
        why = " and ".join(
            f"{name} diverged with {diverged_seeds(values[name])} of {counted(len(values[name]), 'seed')}"
            for name in bad
        )
        if bad:
            sentences.append(f"{why}: {'' if arm in bad else f'{arm} '}not compared with {baseline} by {measure}.")
    return sentences


def without_results(
    pairs: Sequence[Pair], lost: Mapping[str, Sequence[LostRun]], diverged: Collection[str]
) -> list[str]:
    """A sentence for every pair of which one lacks runs that failed, or diverged with every learning rate."""
    sentences = []
    for arm, baseline in pairs:
        reasons = [_reason(name, len(lost.get(name, ())), name in diverged) for name in (arm, baseline)]
        if any(reasons):
            sentences.append(f"{' and '.join(filter(None, reasons))}: {arm} not compared with {baseline}.")
    return sentences


def _reason(arm: str, lost: int, diverged: bool) -> str:
    if lost:
        return f"{arm} lacks {counted(lost, 'run')} that failed"
    return f"{arm} diverged with every learning rate" if diverged else ""


def of_lost_runs(lost: Mapping[str, Sequence[LostRun]]) -> list[str]:
    """Which runs are missing, what follows from that, and how to try them again; nothing where none is."""
    if not lost:
        return []
    runs = {run.key: f"{run.label} ({run.error})" for runs in lost.values() for run in runs}
    return [
        f"Missing: {'; '.join(runs.values())}.",
        f"Until they are there, {', '.join(lost)} {'has' if len(lost) == 1 else 'have'} no verdict, and no learning "
        "rate where a screening run is missing; start the study with --retry-failed to try them again.",
    ]
