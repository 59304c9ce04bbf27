"""The noise between trainings of the same run; pooled.py shows the verdicts that depend on it."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from collect import REPEATS

from nalora.errors import counted
from nalora.evaluation.significance import compare_methods
from nalora.runs.folder import HELD_OUT
from tables.run_tables import read_tables

# The losses of every training of a run, by the run's key: the training that counts is the last.
Trainings = Mapping[str, Sequence[Mapping[str, float]]]


def trainings(results: Path) -> Trainings:
    """The losses of all trainings, from repeats.jsonl and the tables."""
    losses: dict[str, list[Mapping[str, float]]] = {}
    for line in (results / REPEATS).read_text(encoding="utf-8").splitlines():
        earlier = json.loads(line)
        losses.setdefault(earlier["run"], []).append(earlier["losses"])
    return {key: [*losses.get(key, []), run.losses()] for key, run in read_tables(results).items()}


def repeats(trained: Trainings) -> list[str]:
    """The distance between trainings of one run with one seed: the highest minus the lowest of its losses."""
    distances: dict[str, list[float]] = {"validation": [], "test": []}
    repeated = [losses for losses in trained.values() if len(losses) > 1]
    for losses in repeated:
        for evaluation in losses[-1]:
            values = [training[evaluation] for training in losses if evaluation in training]
            if len(values) > 1:
                kind = "validation" if evaluation.endswith(HELD_OUT) else "test"
                distances[kind].append(max(values) - min(values))
    sizes = [
        f"their {kind} losses differ by {statistics.median(sizes):.4f} "
        f"(median of {len(sizes)}; at most {max(sizes):.4f})"
        for kind, sizes in distances.items()
        if sizes
    ]
    again = "was trained" if len(repeated) == 1 else "were trained"
    return [
        f"- **Noise.** {counted(len(repeated), 'run')} {again} again with the same seed:",
        f"  {', '.join(sizes)}.",
    ]


def significant_differences(values: dict[str, dict[int, float]], baseline: str, planned: int) -> str:
    """Return a sentence with the arms that differ from the baseline after correction, and their differences."""
    pairs = [(arm, baseline) for arm in values if arm != baseline]
    compared = compare_methods(values, pairs, higher_is_better=False, planned=planned)
    parts = []
    for verdict in ("better", "worse"):
        arms = [f"{row.method} ({row.difference:+.4f})" for row in compared if row.verdict == verdict]
        if arms:
            parts.append(f"{verdict} than {baseline}: {', '.join(arms)}")
    return "; ".join(parts) or f"no significant difference from {baseline}"
