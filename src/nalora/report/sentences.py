"""What the numbers of a report say and do not say, in plain sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any, NamedTuple

from nalora.report.data import RunData
from nalora.report.packing import plain
from nalora.report.tables import lower_is_better

Interval = tuple[float, float]
LOSS = "loss of the answers"
# Beyond so many, runs are counted or only named.
_MANY = 3


class Score(NamedTuple):
    """A measure of somebody's answers with its 95 % interval."""

    who: str
    value: float
    interval: Interval | None


def score(who: str, summary: dict[str, Any] | None, measure: str) -> Score | None:
    """A measure of a summary; None where it has no such number."""
    if summary is None:
        return None
    found = summary["target_loss"] if measure == LOSS else summary["measures"].get(measure)
    if found is None:
        return None
    interval = found.get("binomial") or found.get("bootstrap")
    pair = (plain(float(interval[0])), plain(float(interval[1]))) if interval else None
    return Score(who, plain(float(found["value"])), pair)


def base_summary(runs: Sequence[RunData], run: RunData, task: str) -> dict[str, Any] | None:
    """What the run's base model answered; another run of the same base may have been asked in its place."""
    for each in (run, *runs):
        asked = each.evaluations.get(task, {})
        if each.model == run.model and "base" in asked:
            return asked["base"]
    return None


def measures_of(runs: Sequence[RunData], task: str) -> list[str]:
    """The measures of a task in the order of its summaries, the loss of the right answers last."""
    names: dict[str, None] = {}
    has_loss = False
    for run in runs:
        for summary in run.evaluations.get(task, {}).values():
            names |= dict.fromkeys(summary["measures"])
            has_loss |= summary["target_loss"] is not None
    return [*names, *([LOSS] if has_loss else [])]


def findings(runs: Sequence[RunData]) -> list[str]:
    """Whether each run learnt, and whether any beats another, as far as the intervals go."""
    sentences: list[str] = []
    for task in dict.fromkeys(task for run in runs for task in run.evaluations):
        measures = measures_of(runs, task)
        if measures:
            sentences += _of_task(runs, task, measures[0])
            if LOSS in measures[1:]:
                sentences += _of_task(runs, task, LOSS)
    if not sentences:
        sentences.append("No run was asked held-out questions, so only the loss on its training data is known.")
    return [*sentences, *_seeds(runs)]


def _of_task(runs: Sequence[RunData], task: str, measure: str) -> Iterator[str]:
    what = f"{measure} on {task}"
    after: list[Score] = []
    verdicts: dict[tuple[Score, str], list[Score]] = {}
    for run in runs:
        adapted = score(run.name, run.evaluations.get(task, {}).get("adapted"), measure)
        if adapted is None:
            continue
        after.append(adapted)
        before = score("base", base_summary(runs, run, task), measure)
        if before is not None:
            verdicts.setdefault((before, _verdict(before, adapted, measure)), []).append(adapted)
    for (before, verdict), scores in verdicts.items():
        listed = ", ".join(each.who if len(scores) > _MANY else f"{each.who} {_shown(each)}" for each in scores)
        yield f"{verdict}: {what} was {_shown(before)} before training; after it {listed}."
    if len(after) > 1:
        yield f"Run against run, {what}: {_against_one_another(after, measure)}."


def _verdict(before: Score, after: Score, measure: str) -> str:
    if before.interval is None or after.interval is None:
        return "No interval, so nothing about chance"
    if _overlap(before, after):
        return "Perhaps chance, as the intervals overlap"
    return "Learnt, beyond chance" if _better(after, before, measure) else "Got worse, beyond chance"


def _against_one_another(scores: Sequence[Score], measure: str) -> str:
    """Who beats whom beyond the intervals; with many runs by the winners' names."""
    beaten: dict[str, list[str]] = {}
    for a, b in combinations(scores, 2):
        if not _overlap(a, b):
            winner, loser = (a, b) if _better(a, b, measure) else (b, a)
            beaten.setdefault(winner.who, []).append(loser.who)
    if not beaten:
        return "all 95 % intervals overlap, which does not show that one is better"
    clauses = [
        f"{winner} is better than {len(losers)}"
        if len(losers) > _MANY
        else f"{winner} is better than {', '.join(losers)}"
        for winner, losers in beaten.items()
    ]
    pairs = len(scores) * (len(scores) - 1) // 2
    caution = f"; of {pairs} pairs a few differ by chance alone" if pairs > 2 * _MANY else ""
    return "beyond their 95 % intervals, " + "; ".join(clauses) + "; all others overlap" + caution


def _better(a: Score, b: Score, measure: str) -> bool:
    return a.value < b.value if lower_is_better(measure) else a.value > b.value


def _overlap(a: Score, b: Score) -> bool:
    if a.interval is None or b.interval is None:
        return True
    return a.interval[0] <= b.interval[1] and b.interval[0] <= a.interval[1]


def _shown(score: Score) -> str:
    text = f"{score.value:.3g}"
    return text if score.interval is None else f"{text} ({score.interval[0]:.3g} … {score.interval[1]:.3g})"


def _seeds(runs: Sequence[RunData]) -> Iterator[str]:
    seeds: dict[tuple[str, ...], set[Any]] = {}
    for run in runs:
        # Runs that differ in nothing but the seed are one setting, tried again.
        rest = {k: v for k, v in run.settings.items() if k not in ("seed", "output")}
        seeds.setdefault(tuple(f"{k}={v}" for k, v in sorted(rest.items())), set()).add(run.settings.get("seed"))
    if runs and all(len(each) < 2 for each in seeds.values()):
        yield (
            "Every setting was run with one seed. The intervals are about which questions were asked; how much "
            "another seed would change is not known."
        )
