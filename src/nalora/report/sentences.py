"""What the numbers of a report say and do not say, in plain sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any, NamedTuple

from nalora.report.data import RunData

Interval = tuple[float, float]
LOSS = "loss of the answers"


class Score(NamedTuple):
    """A measure of somebody's answers with its 95 % interval."""

    who: str
    value: float
    interval: Interval | None


def score(who: str, summary: dict[str, Any] | None, measure: str) -> Score | None:
    """A measure of a summary; None where it has no such number."""
    if not isinstance(summary, dict):
        return None
    found = summary.get("target_loss") if measure == LOSS else (summary.get("measures") or {}).get(measure)
    if not isinstance(found, dict) or not isinstance(found.get("value"), int | float):
        return None
    interval = found.get("binomial") or found.get("bootstrap")
    pair = (float(interval[0]), float(interval[1])) if isinstance(interval, list | tuple) else None
    return Score(who, float(found["value"]), pair)


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
            names |= dict.fromkeys(summary.get("measures") or {})
            has_loss |= isinstance(summary.get("target_loss"), dict)
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
    after: list[Score] = []
    for run in runs:
        adapted = score(run.name, run.evaluations.get(task, {}).get("adapted"), measure)
        if adapted is None:
            continue
        after.append(adapted)
        before = score("base", base_summary(runs, run, task), measure)
        if before is not None:
            yield f"{run.name}, {_in_words(task, measure)}: {_change(before, adapted, measure)}"
    pairs = list(combinations(after, 2))
    apart = [(a, b) for a, b in pairs if not _overlap(a, b)]
    for a, b in apart:
        better, worse = (a, b) if _better(a, b, measure) else (b, a)
        yield (
            f"On {_in_words(task, measure)}, {better.who} ({_shown(better)}) is better than "
            f"{worse.who} ({_shown(worse)}): their 95 % intervals do not overlap."
        )
    if pairs and not apart:
        yield (
            f"On {_in_words(task, measure)} the 95 % intervals of all {len(after)} runs overlap: this does not show "
            "that one is better than another."
        )


def _change(before: Score, after: Score, measure: str) -> str:
    went = "rose" if after.value > before.value else "fell" if after.value < before.value else "stayed"
    text = f"{went} from {_shown(before)} to {_shown(after)}; "
    if before.interval is None or after.interval is None:
        return text + "without intervals nothing can be said about chance."
    if _overlap(before, after):
        return text + "the intervals overlap, so this may be chance."
    good = _better(after, before, measure)
    return text + f"the intervals do not overlap, so it {'learnt' if good else 'got worse, surely'}."


def _better(a: Score, b: Score, measure: str) -> bool:
    lower_is_better = "loss" in measure or "perplexity" in measure
    return a.value < b.value if lower_is_better else a.value > b.value


def _overlap(a: Score, b: Score) -> bool:
    if a.interval is None or b.interval is None:
        return True
    return a.interval[0] <= b.interval[1] and b.interval[0] <= a.interval[1]


def _in_words(task: str, measure: str) -> str:
    return f"{measure} on {task}"


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
