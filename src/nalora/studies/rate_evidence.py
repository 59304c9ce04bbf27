"""What is known about the rule of `nalora suggest`: how its picks compare with the best rates of stored grids.

`results/rate_evidence.py` writes rate_evidence.json from the stored runs; the command prints it next to its pick.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nalora.errors import counted
from nalora.studies.rate_rules import Case, Rule, mean_regret

FILE = Path(__file__).with_name("rate_evidence.json")
# The rule of `nalora suggest` until studies/rate-search.yaml has judged all of them.
RULE = Rule("training loss", "loss", steps=30, stride=1, number=0.0)


@dataclass(frozen=True)
class Counts:
    """A rule's picks in the grids of a task.

    Args:
        grids: number of grids of learning rates.
        below: picks below the best rate of their grid, by the final validation loss.
        at: picks that are the best rate.
        above: picks above it.
        lowest: picks that are the lowest rate of their grid, so that a wider grid may have given a lower one.
        loss_above_best: mean of the pick's final loss minus the best one of the grid.
        next_grids: grids with a rate an octave above the pick.
        next_better: those in which that rate has the lower final loss.
        next_gap: in these, the largest amount by which its loss after the first steps was above the pick's, as a share.
    """

    grids: int
    below: int
    at: int
    above: int
    lowest: int
    loss_above_best: float
    next_grids: int
    next_better: int
    next_gap: float


@dataclass(frozen=True)
class Evidence:
    """A rule with its counts by task, and the runs that they are from."""

    rule: Rule
    tasks: Mapping[str, Counts]
    model: str
    parameters: int
    steps: tuple[int, ...]

    @property
    def total(self) -> Counts:
        """The counts of all tasks together."""
        tasks = list(self.tasks.values())
        sums = {field.name: sum(getattr(task, field.name) for task in tasks) for field in dataclasses.fields(Counts)}
        mean = sum(task.grids * task.loss_above_best for task in tasks) / max(sums["grids"], 1)
        return Counts(**sums | {"loss_above_best": mean, "next_gap": max(task.next_gap for task in tasks)})

    def sentences(self) -> list[str]:
        """Return how far the rule's picks were from the best rates, and what this does not show."""
        total, names = self.total, " and ".join(self.tasks)
        steps = " or ".join(map(str, self.steps))
        return [
            f"In {counted(total.grids, 'grid')} on {counted(len(self.tasks), 'task')} ({names}) such a pick was "
            f"{_times('above', total.above)} the best rate, {_times('at', total.at)} it and "
            f"{_times('below', total.below)} it; on average its final loss was {total.loss_above_best:.4f} above the "
            "best of the grid.",
            f"In {total.lowest} of these grids it was the lowest rate of the grid, so that a wider grid may have given "
            "a lower pick and a larger loss.",
            "These grids were looked at when the rule was chosen: it has not been judged on any other task. All are of "
            f"one model ({self.model}, {self.parameters / 1e6:.0f}M parameters), with runs of {steps} steps, and grids "
            "of one task share its data and seed.",
        ]

    def on_the_next_rate(self) -> str:
        """Return on which tasks the rate an octave above the pick was better, as the end of a sentence."""
        parts = [
            f"{task.next_better} of {counted(task.next_grids, 'grid')} on {name}"
            for name, task in self.tasks.items()
            if task.next_grids
        ]
        return f"the rate an octave above the pick was better in {' and in '.join(parts)}"


def _times(side: str, number: int) -> str:
    return f"never {side}" if number == 0 else f"{number} times {side}"


def counts(rule: Rule, cases: Sequence[Case]) -> Counts:
    """Return the counts of a rule in the grids of a task."""
    picks = [(case, rule.pick(case)) for case in cases]
    best = [min(case.rates, key=case.losses.__getitem__) for case in cases]
    sides = [math.copysign(1, pick - rate) if pick != rate else 0 for (_, pick), rate in zip(picks, best, strict=True)]
    following = [(case, pick, rate) for case, pick in picks if (rate := octave_above(case.rates, pick))]
    better = [(case, pick, rate) for case, pick, rate in following if case.losses[rate] < case.losses[pick]]
    name = f"{rule.measure}@{rule.steps}"
    gaps = [case.early[rate][name] / case.early[pick][name] - 1 for case, pick, rate in better]
    return Counts(
        grids=len(cases),
        below=sides.count(-1),
        at=sides.count(0),
        above=sides.count(1),
        lowest=sum(pick == case.rates[0] for case, pick in picks),
        loss_above_best=round(mean_regret(rule, cases), 6),
        next_grids=len(following),
        next_better=len(better),
        next_gap=round(max(gaps, default=0.0), 4),
    )


def octave_above(rates: Sequence[float], rate: float) -> float | None:
    """Return the rate of a grid that is twice this one; None without one."""
    return next((other for other in rates if abs(math.log2(other / rate) - 1) < 0.05), None)


def to_json(evidence: Evidence) -> dict[str, Any]:
    """Return the evidence as the content of its file."""
    return dataclasses.asdict(evidence) | {"steps": list(evidence.steps)}


@functools.cache
def known() -> Evidence:
    """Return the evidence that comes with nalora."""
    content = json.loads(FILE.read_text(encoding="utf-8"))
    tasks = {name: Counts(**task) for name, task in content["tasks"].items()}
    rule, steps = Rule(**content["rule"]), tuple(content["steps"])
    return Evidence(rule, tasks, content["model"], content["parameters"], steps)
