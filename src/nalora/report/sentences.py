"""Findings of a report in plain sentences: which results changed, and which runs differ."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

from nalora.evaluation.answers import LOSS
from nalora.evaluation.intervals import Interval
from nalora.evaluation.paired import FEWEST_QUESTIONS, PairedComparison
from nalora.evaluation.significance import FEWEST_SEEDS, compare_methods
from nalora.report.comparisons import base_summary, compared_with_base, compared_with_each_other
from nalora.report.data import RunData
from nalora.report.naming import row_labels, seed_of
from nalora.report.tables import lower_is_better
from nalora.tasks.text_measures import title_of

# Longer lists of runs have no numbers, or only their length.
_MANY = 3


class Score(NamedTuple):
    """A measure of a model's answers with its 95 % interval; `is_share` if it counts right answers."""

    value: float
    interval: Interval | None
    is_share: bool

    def text(self, *, interval: bool = True) -> str:
        """Return the number, shares in percent, such as ``49 % (95 % CI 39–59)``."""
        scale, unit = (100, " %") if self.is_share else (1, "")
        value = f"{scale * self.value:.3g}{unit}"
        if self.interval is None or not interval:
            return value
        low, high = (f"{scale * end:.3g}" for end in self.interval)
        return f"{value} (95 % CI {low}{' to ' if low.startswith('-') else '–'}{high})"


def score(summary: dict[str, Any] | None, measure: str) -> Score | None:
    """Return a measure of a summary; None where it has no such number."""
    measured = (summary["target_loss"] if measure == LOSS else summary["measures"].get(measure)) if summary else None
    if measured is None:
        return None
    ends = measured.get("binomial") or measured.get("bootstrap")
    interval = Interval(*map(_rounded, ends)) if ends else None
    return Score(_rounded(measured["value"]), interval, bool(measured.get("binomial")))


def _rounded(value: float) -> float:
    """Return the value with six digits; below 1e-12, the size of rounding errors, it is 0."""
    return 0.0 if abs(value) < 1e-12 else float(f"{value:.6g}")


def tasks_of(runs: Sequence[RunData]) -> list[str]:
    """Return the names of all evaluated tasks."""
    return list(dict.fromkeys(task for run in runs for task in run.evaluations))


def measures_of(runs: Sequence[RunData], task: str) -> list[str]:
    """Return the measures of a task in the order of its summaries, the loss of the right answers last."""
    summaries = [summary for run in runs for summary in run.evaluations.get(task, {}).values()]
    names = dict.fromkeys(name for summary in summaries for name in summary["measures"])
    return [*names, *([LOSS] if any(summary["target_loss"] is not None for summary in summaries) else [])]


def findings(runs: Sequence[RunData]) -> list[str]:
    """Return sentences on whether training changed each run's results, and whether any run is better than another."""
    sentences: list[str] = []
    for task in tasks_of(runs):
        measures = measures_of(runs, task)
        for measure in dict.fromkeys([*measures[:1], *(name for name in measures if name == LOSS)]):
            sentences += _of_task(runs, task, measure)
    if not sentences:
        sentences.append("No run was evaluated on held-out questions, so only the loss on its training data is known.")
    if runs and len({*row_labels(runs)}) == len(runs):
        sentences.append(
            "Every setting was run with one seed. Intervals and tests show the effect of the choice of test questions "
            "alone: a difference between such runs is none between their methods, which takes three seeds or more."
        )
    return sentences


def _of_task(runs: Sequence[RunData], task: str, measure: str) -> Iterator[str]:
    name = f"{title_of(measure)} on {task}"
    adapted = {i: score(run.evaluations.get(task, {}).get("adapted"), measure) for i, run in enumerate(runs)}
    after = {i: value for i, value in adapted.items() if value}
    before = {i: value for i in after if (value := score(base_summary(runs, runs[i], task), measure))}
    compared = compared_with_base(runs, task, measure)
    groups: dict[tuple[Score, str], list[int]] = {}
    for i, base in before.items():
        groups.setdefault((base, _kind(after[i], base, compared.get(i))), []).append(i)
    for (base, kind), members in groups.items():
        texts = [f"{after[i].text()}{f' in {runs[i].name}' if len(runs) > 1 else ''}" for i in members]
        names = ", ".join(runs[i].name for i in members)
        yield _change(name, base, kind, f"in {names}" if len(members) > _MANY else f"to {', '.join(texts)}")
    repeated = _over_seeds(runs, after)
    if len(repeated) > 1:
        higher = not lower_is_better(measure)
        over_seeds = compare_methods(repeated, list(combinations(repeated, 2)), higher_is_better=higher)
        verdicts = {(one.method, one.baseline): str(one.verdict) for one in over_seeds}
        yield _differences(name, "the settings over their seeds", verdicts)
    elif len(after) > 1:
        yield _between_runs(name, compared_with_each_other(runs, task, measure))


def _kind(after: Score, base: Score, compared: PairedComparison | None) -> str:
    """Return rose or fell for a significant change, and otherwise why there is none."""
    if compared is None:
        return "unknown"
    if compared.verdict in ("better", "worse"):
        return "rose" if after.value > base.value else "fell"
    return "equal" if after.value == base.value else compared.verdict


def _change(name: str, base: Score, kind: str, listed: str) -> str:
    start = f"{name[:1].upper()}{name[1:]}"
    if kind in ("rose", "fell"):
        return f"{start} {kind} from {base.text(interval=False)} {listed}."
    if kind == "equal":
        return f"{start} did not change: {base.text()} before, {listed.removeprefix('to ')} after training."
    reason = {
        "unknown": "The answers are not stored, so the significance of the change is not known",
        "too few questions": f"Fewer than {FEWEST_QUESTIONS} questions, which cannot show a significant change",
    }.get(kind, "No significant change")
    return f"{reason}: {name} went from {base.text()} {listed}."


def _between_runs(name: str, compared: Mapping[tuple[str, str], PairedComparison]) -> str:
    if not compared:
        return f"The runs are not compared, since the answers to the same questions are not stored: {name}."
    if not any(one.higher or one.lower for one in compared.values()):
        return f"The runs have the same {name}, question by question."
    sentence = _differences(name, "the runs", {pair: one.verdict for pair, one in compared.items()})
    if len(compared) == 1:
        ((first, _), one), *_ = compared.items()
        sentence = f"{sentence[:-1]} ({first} {one.evidence()})."
    return sentence


def _over_seeds(runs: Sequence[RunData], scores: Mapping[int, Score]) -> dict[str, dict[int, float]]:
    """Return the values of each setting by seed, of settings with enough seeds, none of which diverged."""
    values: dict[str, dict[int, float]] = {}
    for i, label in enumerate(row_labels(runs)):
        if i in scores:
            values.setdefault(label, {})[seed_of(runs[i])] = scores[i].value
    return {
        label: by_seed
        for label, by_seed in values.items()
        if len(by_seed) >= FEWEST_SEEDS and all(map(math.isfinite, by_seed.values()))
    }


def _differences(name: str, compared: str, verdicts: Mapping[tuple[str, str], str]) -> str:
    """Return which is better than which; with many runs only the number that it is better than."""
    worse: dict[str, list[str]] = {}
    for (one, other), verdict in verdicts.items():
        if verdict in ("better", "worse"):
            winner, loser = (one, other) if verdict == "better" else (other, one)
            worse.setdefault(winner, []).append(loser)
    if not worse:
        return f"No significant difference between {compared}: {name}."
    clauses = [
        f"{winner} is better than {len(losers) if len(losers) > _MANY else ', '.join(losers)}"
        for winner, losers in worse.items()
    ]
    if len(verdicts) > 1:
        clauses.append("no other difference is significant (p ≤ 0.05, Holm-corrected)")
    return f"Comparison of {compared}, {name}: {'; '.join(clauses)}."
