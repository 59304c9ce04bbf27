"""What choosing a learning rate by the training loss of the first steps would have cost in stored studies.

Nothing was planned for this question: the grids of stored studies are looked at again, on the two tasks that the rules
of `studies/rate-search.yaml` are fitted on. The tasks that it judges them on are left alone.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from tables.stored_answers import study

from nalora.errors import counted
from nalora.studies.conduct import so_far
from nalora.studies.rate_cases import cases_of
from nalora.studies.rate_rules import Case, Rule, fit, mean_regret
from nalora.studies.rate_verdicts import Criterion

# The studies of each task, with the distance of their rates in octaves.
TASKS = {"GSM8K": {"gsm8k": 1.0, "equal-cost": 0.5}, "cipher": {"caesar": 1.0}}
STEPS = 30
SHIFTS = (0.0, 0.5, 1.0)  # octaves
FAMILIES = ("training loss", "gradient norm", "same rate")
_CLOSE = Criterion().regret

Cases = Mapping[str, Sequence[Case]]


def early_losses(store: Path) -> list[str]:
    """Return a table of the loss that is lost by picks from early losses, and how rules fare on the other task."""
    by_study: dict[str, list[Case]] = {}
    by_task: dict[str, list[Case]] = {}
    for (task, name), cases in grids(store).items():
        spacing = "half an octave" if TASKS[task][name] == 0.5 else "an octave"
        by_study[f"{task} ({name}), {spacing} apart"] = cases
        by_task.setdefault(task, []).extend(cases)
    return [*shifts_table(by_study), "", *transfer_table(by_task)]


def grids(store: Path) -> dict[tuple[str, str], list[Case]]:
    """Return the grids with early losses, by task and study."""
    found = {}
    for task, studies in TASKS.items():
        for name, octaves in studies.items():
            progress = so_far(study(name), store)
            cases = cases_of(progress.schedule, progress.results)
            found[task, name] = [case for case in cases if is_grid(case, octaves)]
    return found


def is_grid(case: Case, octaves: float) -> bool:
    """Whether a case has at least three rates at this distance, and early losses for a pick."""
    distances = [math.log2(high / low) for low, high in zip(case.rates, case.rates[1:], strict=False)]
    measured = all(f"loss@{STEPS}" in case.early[rate] for rate in case.rates if math.isfinite(case.losses[rate]))
    return len(distances) >= 2 and measured and all(abs(distance - octaves) < 0.05 for distance in distances)


def shifts_table(cases: Cases) -> list[str]:
    """Return the mean regret of the rate with the lowest loss after 30 steps, and of the rates above it."""
    heads = ["its own", "half an octave above", "an octave above"]
    lines = [
        f"| rate with the lowest loss after {STEPS} steps | grids | below the best, at it, above it | "
        + " | ".join(heads)
        + " |",
        "|---|---|---|" + "---|" * len(heads),
    ]
    for title, of_study in cases.items():
        if not of_study:
            continue
        picks = [_by_loss(0).pick(case) for case in of_study]
        best = [min(case.rates, key=lambda rate, losses=case.losses: losses[rate]) for case in of_study]
        sides = [sum(sign(pick, of) == side for pick, of in zip(picks, best, strict=True)) for side in (-1, 0, 1)]
        cells = [_regret(of_study, shift) for shift in SHIFTS]
        lines.append(f"| {title} | {len(of_study)} | {', '.join(map(str, sides))} | {' | '.join(cells)} |")
    return lines


def transfer_table(cases: Cases) -> list[str]:
    """Return how rules with one fitted number do on the task that they were fitted on, and on the other one."""
    (first, of_first), (second, of_second) = cases.items()
    lines = [
        f"| rule | fitted on {first}: there | on {second} | fitted on {second}: there | on {first} |",
        "|---|---|---|---|---|",
    ]
    for family in FAMILIES:
        cells = []
        for fitted, other in ((of_first, of_second), (of_second, of_first)):
            rule = fit(family, fitted)
            cells += [_summary(rule, fitted), _summary(rule, other)]
        lines.append(f"| {family} | {' | '.join(cells)} |")
    total = counted(len(of_first) + len(of_second), "grid")
    lines += ["", f"Mean loss above the best of the grid (grids within {_CLOSE}); {total} in all."]
    return lines


def sign(rate: float, best: float) -> int:
    """Return -1 for a rate below the best one, 0 for the best, 1 for one above it."""
    return (rate > best) - (rate < best)


def _by_loss(octaves: float) -> Rule:
    return Rule("training loss", "loss", STEPS, 1, 2 * octaves)


def _regret(cases: Sequence[Case], octaves: float) -> str:
    """Return the mean regret of a shifted pick; empty where the grids have no rate at that distance."""
    apart = statistics.median(math.log2(case.rates[1] / case.rates[0]) for case in cases)
    steps = octaves / apart
    return _summary(_by_loss(octaves), cases) if abs(steps - round(steps)) < 0.1 else ""


def _summary(rule: Rule, cases: Sequence[Case]) -> str:
    close = sum(case.regret(rule.pick(case)) <= _CLOSE for case in cases)
    return f"{mean_regret(rule, cases):.4f} ({close} of {len(cases)})"
