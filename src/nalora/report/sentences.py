"""What the numbers of a report say and do not say, in plain sentences."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

from nalora.evaluation.intervals import Interval
from nalora.evaluation.significance import FEWEST_SEEDS, Estimate, compare_estimates, compare_methods
from nalora.report.data import RunData
from nalora.report.naming import row_labels, seed_of
from nalora.report.packing import plain
from nalora.report.tables import lower_is_better

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
    pair = Interval(*(plain(float(end)) for end in interval)) if interval else None
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
    """Whether training changed each run's results, and whether any run is better than another."""
    sentences: list[str] = []
    for task in dict.fromkeys(task for run in runs for task in run.evaluations):
        measures = measures_of(runs, task)
        if measures:
            sentences += _of_task(runs, task, measures[0])
            if LOSS in measures[1:]:
                sentences += _of_task(runs, task, LOSS)
    if not sentences:
        sentences.append("No run was evaluated on held-out questions, so only the loss on its training data is known.")
    labels = row_labels(runs)
    if runs and len({*labels}) == len(runs):
        sentences.append(
            "Every setting was run with one seed. The intervals show how much the choice of test questions matters; "
            "how much another seed would change is not known."
        )
    return sentences


def _of_task(runs: Sequence[RunData], task: str, measure: str) -> Iterator[str]:
    what = f"{measure} on {task}"
    higher = not lower_is_better(measure)
    after: dict[int, Score] = {}  # by the run's place
    before: dict[int, Score] = {}
    for place, run in enumerate(runs):
        if adapted := score(run.name, run.evaluations.get(task, {}).get("adapted"), measure):
            after[place] = adapted
            if base := score("base", base_summary(runs, run, task), measure):
                before[place] = base
    changes = _compared({place: (after[place], base) for place, base in before.items()}, higher_is_better=higher)
    groups: dict[tuple[Score, str], list[Score]] = {}
    for place, base in before.items():
        groups.setdefault((base, _CHANGES[changes.get(place, "")]), []).append(after[place])
    for (base, change), scores in groups.items():
        listed = ", ".join(one.who if len(scores) > _MANY else f"{one.who} {_shown(one)}" for one in scores)
        yield f"{change}: {what} was {_shown(base)} before training; after training: {listed}."
    repeated = _over_seeds(runs, after)
    if len(repeated) > 1:
        compared = compare_methods(repeated, list(combinations(repeated, 2)), higher_is_better=higher)
        verdicts = {(one.method, one.baseline): str(one.verdict) for one in compared}
        yield f"Comparison of settings over their seeds, {what}: {_differences(verdicts)}."
    elif len(after) > 1:
        pairs = {(one.who, other.who): (one, other) for one, other in combinations(after.values(), 2)}
        yield f"Comparison of runs, {what}: {_differences(_compared(pairs, higher_is_better=higher))}."


_CHANGES = {
    "better": "Significant improvement",
    "worse": "Significantly worse",
    "not distinguishable": "No significant change",
    "": "No interval, so significance is not known",
}


def _compared(pairs: Mapping[Any, tuple[Score, Score]], *, higher_is_better: bool) -> dict[Any, str]:
    """The verdict on each pair of which both have an interval."""
    estimates = {
        claim: (Estimate(one.value, one.interval), Estimate(other.value, other.interval))
        for claim, (one, other) in pairs.items()
        if one.interval is not None and other.interval is not None
    }
    return dict(compare_estimates(estimates, higher_is_better=higher_is_better))


def _over_seeds(runs: Sequence[RunData], scores: Mapping[int, Score]) -> dict[str, dict[int, float]]:
    """The values of each setting by seed, of those with enough seeds, none of which diverged."""
    values: dict[str, dict[int, float]] = {}
    for place, label in enumerate(row_labels(runs)):
        if place in scores:
            values.setdefault(label, {})[seed_of(runs[place])] = scores[place].value
    return {
        label: by_seed
        for label, by_seed in values.items()
        if len(by_seed) >= FEWEST_SEEDS and all(map(math.isfinite, by_seed.values()))
    }


def _differences(verdicts: Mapping[tuple[str, str], str]) -> str:
    """Which is better than which; with many runs only how many it is better than."""
    worse: dict[str, list[str]] = {}
    for (one, other), verdict in verdicts.items():
        if verdict in ("better", "worse"):
            winner, loser = (one, other) if verdict == "better" else (other, one)
            worse.setdefault(winner, []).append(loser)
    if not worse:
        return "no significant difference"
    clauses = [
        f"{winner} is better than {len(losers) if len(losers) > _MANY else ', '.join(losers)}"
        for winner, losers in worse.items()
    ]
    return f"{'; '.join(clauses)}; no other difference is significant (p ≤ 0.05, Holm-corrected)"


def _shown(score: Score) -> str:
    text = f"{score.value:.3g}"
    return text if score.interval is None else f"{text} (95 % CI {score.interval.low:.3g} … {score.interval.high:.3g})"
