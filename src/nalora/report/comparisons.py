"""Runs compared with their base model and with each other by the questions that they answered.

The scores of single questions are read from the folders of the evaluations. Where they are missing, as in results of
which only the summaries were kept, nothing is compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from nalora.evaluation.answers import Weighted, read_scores
from nalora.evaluation.paired import Pair, PairedComparison, compare_answers
from nalora.report.data import RunData
from nalora.report.tables import lower_is_better


def base_summary(runs: Sequence[RunData], run: RunData, task: str) -> dict[str, Any] | None:
    """Return the summary of the run's base model, which may be stored in another run of the same base model."""
    for other in (run, *runs):
        evaluated = other.evaluations.get(task, {})
        if other.model == run.model and "base" in evaluated:
            return evaluated["base"]
    return None


def compared_with_base(runs: Sequence[RunData], task: str, measure: str) -> dict[int, PairedComparison]:
    """Compare each run with its base model, corrected for their number; by the place of the run."""
    bases: dict[str, Mapping[str, Weighted]] = {}
    pairs = {}
    for i, own in _scores(runs, task, measure).items():
        base = base_summary(runs, runs[i], task)
        if base is not None:
            folder = str(base["folder"])
            if folder not in bases:
                bases[folder] = _read(base, measure)
            pairs[i] = Pair(own, bases[folder])
    return compare_answers(pairs, higher_is_better=not lower_is_better(measure))


def compared_with_each_other(
    runs: Sequence[RunData], task: str, measure: str
) -> dict[tuple[str, str], PairedComparison]:
    """Compare every run with every other, corrected for the number of pairs; by the names of the runs."""
    scores = _scores(runs, task, measure)
    pairs = {(runs[i].name, runs[j].name): Pair(scores[i], scores[j]) for i, j in combinations(scores, 2)}
    return compare_answers(pairs, higher_is_better=not lower_is_better(measure))


def _scores(runs: Sequence[RunData], task: str, measure: str) -> dict[int, Mapping[str, Weighted]]:
    """Return the score of every question that is stored, of the runs that have any; by the place of the run."""
    summaries = (run.evaluations.get(task, {}).get("adapted") for run in runs)
    read = {i: _read(summary, measure) for i, summary in enumerate(summaries) if summary is not None}
    return {i: scores for i, scores in read.items() if scores}


def _read(summary: Mapping[str, Any], measure: str) -> dict[str, Weighted]:
    return read_scores(Path(str(summary["folder"])), measure, summary.get("examples"))
