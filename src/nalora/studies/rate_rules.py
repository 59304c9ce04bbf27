"""Rules that pick a learning rate from the first steps of a few short runs, and how far the pick is from the best.

A rule is fitted on some cases, written to a file, and judged on others. A case is one task, rank, method and model with
a grid of learning rates, each trained to the end. A rule sees the first steps of some of these runs only. All rules are
fitted alike: one number each, chosen for the lowest mean regret, the chosen rate's final loss minus the best one's.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from nalora.errors import NALoRAError

# A plan of short runs: how many steps each, and which of the grid's rates (2: every second, from the lowest).
Plan = tuple[int, int]
PLANS: tuple[Plan, ...] = ((30, 1), (60, 2))
# The families of rules, with the measures that each may use. `gates` is the one on trial, the others are its rivals.
GATES = "gates"
FAMILIES: Mapping[str, tuple[str, ...]] = {
    GATES: ("flip", "D_sel", "kappa_drift", "severe"),
    "update to weight": ("update_to_weight",),
    "gradient norm": ("rate_times_gradient", "gradient_growth"),
    "training loss": ("loss",),
    "range test": ("range_minimum", "range_steepest"),
    "same rate": ("fixed",),
}
# A run that diverged has an infinite loss; one bad case must not decide a mean alone.
LARGEST_REGRET = 0.1
_TARGETS = 200
_SHIFTS = range(-12, 13)  # in half octaves


@dataclass(frozen=True)
class Case:
    """One task, rank, method and model.

    Args:
        name: for tables.
        steps: optimizer steps of a run to the end.
        losses: final validation loss of every learning rate; infinite if it diverged.
        early: measures of the first steps by learning rate and by ``NAME@STEP``; missing where the run had diverged.
        range_test: learning rate and training loss of every step of a range test.
    """

    name: str
    steps: int
    losses: Mapping[float, float]
    early: Mapping[float, Mapping[str, float]]
    range_test: Sequence[tuple[float, float]] = ()

    @property
    def rates(self) -> list[float]:
        """The grid, from the lowest rate."""
        return sorted(self.losses)

    def regret(self, rate: float) -> float:
        """Return the final loss of a rate of the grid minus the lowest one, at most `LARGEST_REGRET`."""
        return min(self.losses[rate] - min(self.losses.values()), LARGEST_REGRET)


@dataclass(frozen=True)
class Rule:
    """How a rate is chosen: a measure of the first steps, a plan of short runs, and one fitted number.

    `number` is the value of the measure at the chosen rate. For the training loss and the range test, which have a
    lowest point, it is the shift from that point in half octaves; for ``fixed`` it is the rate.
    """

    family: str
    measure: str
    steps: int
    stride: int
    number: float

    def pick(self, case: Case) -> float:
        """Return the rate of the case's grid that the rule chooses.

        Raises NALoRAError if the case lacks what the rule needs.
        """
        if self.measure == "fixed":
            return nearest(case.rates, self.number)
        if self.measure.startswith("range_"):
            return nearest(case.rates, _of_range_test(case, self.measure) * 2 ** (self.number / 2))
        probed = case.rates[:: self.stride]
        values = {rate: case.early.get(rate, {}).get(f"{self.measure}@{self.steps}") for rate in probed}
        known = {rate: value for rate, value in values.items() if value is not None and math.isfinite(value)}
        if not known:
            raise NALoRAError(
                case.name,
                found=f"no run with {self.measure} after {self.steps} steps",
                expected="runs with gate_movement_steps and log_every: 1",
                fix="train the study with these settings",
            )
        if self.measure == "loss":
            return nearest(case.rates, min(known, key=lambda rate: known[rate]) * 2 ** (self.number / 2))
        return nearest(case.rates, crossing(known, self.number))

    def cost(self, case: Case) -> float:
        """Return the rule's steps as a share of those of the whole grid, with one seed."""
        grid = case.steps * len(case.rates)
        if self.measure == "fixed":
            return 0.0
        if self.measure.startswith("range_"):
            return len(case.range_test) / grid
        return self.steps * len(case.rates[:: self.stride]) / grid


def nearest(rates: Sequence[float], rate: float) -> float:
    """Return the rate of the grid that is nearest on a logarithmic scale."""
    return min(rates, key=lambda other: abs(math.log(other / rate)))


def crossing(values: Mapping[float, float], target: float) -> float:
    """Return the rate at which a measure that grows with the rate reaches the target, between rates on log scales.

    Below the lowest value it is the lowest rate, above all values the highest one. If noise makes the measure cross the
    target several times, the first crossing counts: a rate that is too low costs less than one that diverges.
    """
    points = [(math.log(rate), math.log(max(value, 1e-300))) for rate, value in sorted(values.items())]
    goal = math.log(target)
    for index, (place, value) in enumerate(points):
        if value >= goal:
            if index == 0:
                return math.exp(place)
            before, low = points[index - 1]
            return math.exp(before + (place - before) * (goal - low) / (value - low))
    return math.exp(points[-1][0])


def smoothed(curve: Sequence[tuple[float, float]], weight: float = 0.9) -> list[tuple[float, float]]:
    """Return a curve with exponentially averaged losses, without the bias of the first values, up to its divergence."""
    average, points = 0.0, []
    for index, (rate, loss) in enumerate(curve, 1):
        if not math.isfinite(loss):
            break
        average = weight * average + (1 - weight) * loss
        points.append((rate, average / (1 - weight**index)))
    return points


def _of_range_test(case: Case, measure: str) -> float:
    """Return the rate with the lowest smoothed loss of a range test, or the one at which the loss falls fastest."""
    points = smoothed(case.range_test)
    if len(points) < 3:
        raise NALoRAError(
            case.name,
            found=f"a range test of {len(points)} steps",
            expected="the learning rate and the loss of every step",
            fix="train studies/rate-range-test.yaml with log_every: 1",
        )
    lowest = min(range(len(points)), key=lambda index: points[index][1])
    if measure == "range_minimum" or lowest < 2:
        return points[lowest][0]
    steepest = min(range(1, lowest + 1), key=lambda index: points[index][1] - points[index - 1][1])
    return points[steepest][0]


def mean_regret(rule: Rule, cases: Iterable[Case]) -> float:
    """Return the mean over cases of the regret of the rule's pick."""
    return statistics.fmean(case.regret(rule.pick(case)) for case in cases)


def fit(family: str, cases: Sequence[Case]) -> Rule:
    """Return the rule of a family with the lowest mean regret on the cases.

    Many numbers give the same picks: of the best ones in a row, the middle one is taken.
    """
    best: tuple[float, Rule] | None = None
    for measure in FAMILIES[family]:
        for plan in PLANS if f"{measure}@" in _measured(cases) else ((0, 1),):
            candidates = _candidates(family, measure, plan, cases)
            if not candidates:
                continue
            regrets = [mean_regret(rule, cases) for rule in candidates]
            lowest = min(regrets)
            first = regrets.index(lowest)
            length = next((i for i, value in enumerate(regrets[first:]) if value > lowest), len(regrets) - first)
            if best is None or lowest < best[0]:
                best = lowest, candidates[first + (length - 1) // 2]
    if best is None:
        raise NALoRAError(
            f"rules of {family!r}",
            found="no measure that all cases have",
            expected=f"one of {', '.join(FAMILIES[family])}",
            fix="train the study with gate_movement_steps and log_every: 1",
        )
    return best[1]


def _measured(cases: Sequence[Case]) -> set[str]:
    """Return the names of all measures of the first steps, each with the @ that ends it."""
    return {f"{name.partition('@')[0]}@" for case in cases for early in case.early.values() for name in early}


def _candidates(family: str, measure: str, plan: Plan, cases: Sequence[Case]) -> list[Rule]:
    """Return a family's rules with one measure and plan, in the order of their number; none if a case lacks it."""
    steps, stride = plan
    if measure == "fixed":
        rates = sorted({rate for case in cases for rate in case.rates})
        return [Rule(family, measure, 0, 1, rate) for rate in rates]
    if measure.startswith("range_"):
        complete = all(len(smoothed(case.range_test)) >= 3 for case in cases)
        return [Rule(family, measure, 0, 1, shift) for shift in _SHIFTS] if complete else []
    by_case = [
        [early[f"{measure}@{steps}"] for early in case.early.values() if f"{measure}@{steps}" in early]
        for case in cases
    ]
    if not all(by_case):
        return []
    if measure == "loss":
        return [Rule(family, measure, steps, stride, shift) for shift in _SHIFTS]
    values = [value for values in by_case for value in values if value > 0 and math.isfinite(value)]
    if not values:
        return []
    low, high = math.log(min(values)), math.log(max(values))
    targets = [math.exp(low + (high - low) * index / (_TARGETS - 1)) for index in range(_TARGETS)]
    return [Rule(family, measure, steps, stride, target) for target in targets]
