"""What the stored grids say about learning rates: the best one, and the loss that others add."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tables.arm_states import LORA
from tables.stored_answers import FULL, TITLES, Answer, answer_of, study

from nalora.errors import counted

# Every study whose grids count, with its title; those without an answer yet are left out.
GRIDS = {
    "gsm8k": "GSM8K (gsm8k)",
    "equal-cost": "GSM8K (equal-cost)",
    "caesar": "Caesar cipher",
    "judgement": "word sorting",
    "long": TITLES["long"],
    "equal-cost-judged": "sums (equal-cost-judged)",
    "gap-sources": "GSM8K (gap-sources)",
}
DISTANCES = (-2.0, -1.0, -0.5, 0.5, 1.0, 2.0)  # octaves
# A rate at half an octave is written with three digits, so that it is off by at most 0.004 octaves.
_NEAR = 0.05
# A validation loss that is higher by this, in nats for each token, is that of a training that failed.
FAILED = 1.0


class Grid(NamedTuple):
    """The validation loss of an arm by learning rate, infinite where training diverged."""

    title: str
    arm: str
    losses: dict[float, float]
    seeds: int

    @property
    def best(self) -> float:
        """The rate with the lowest loss."""
        return min(self.losses, key=lambda rate: self.losses[rate])

    def rise(self, rate: float) -> float:
        """Return the loss of a rate above that of the best one."""
        return self.losses[rate] - self.losses[self.best]

    def at(self, octaves: float) -> float | None:
        """Return the rise at this distance from the best rate; None if the grid has no such rate."""
        near = (rate for rate in self.losses if abs(math.log2(rate / self.best) - octaves) < _NEAR)
        return next(map(self.rise, near), None)


def grids(results: Path) -> list[Grid]:
    """Return every arm's grid of the studies that have an answer, if all of its rates were trained."""
    found = []
    for name, title in GRIDS.items():
        if (results / name / "answer.json").is_file():
            found += grids_of(answer_of(results, name), title, len(study(name).screening_seeds))
    return found


def grids_of(part: Answer, title: str, seeds: int) -> list[Grid]:
    """Return the complete grids of an answer, of two rates or more."""
    found = []
    for arm, by_rate in part["validation_losses"].items():
        known = {
            float(rate): math.inf if loss == "diverged" else loss
            for rate, loss in by_rate.items()
            if loss == "diverged" or isinstance(loss, float)
        }
        if 1 < len(known) == len(by_rate):
            found.append(Grid(title, arm, known, seeds))
    return found


def start_rate(of_lora: Sequence[Grid]) -> tuple[float, float] | None:
    """Return the rate of all grids whose largest loss above the best of a grid is the lowest, and that loss."""
    if not of_lora:
        return None
    shared = set.intersection(*(set(grid.losses) for grid in of_lora))
    worst = {rate: max(grid.rise(rate) for grid in of_lora) for rate in shared}
    rate = min(sorted(worst), key=lambda rate: worst[rate], default=None)
    return None if rate is None else (rate, worst[rate])


def rates_to_try(of_lora: Sequence[Grid]) -> list[float]:
    """Return the rates from the lowest to the highest best rate of the grids, half an octave apart."""
    low, high = (choose(grid.best for grid in of_lora) for choose in (min, max))
    return [rounded(low * 2 ** (step / 2)) for step in range(round(2 * math.log2(high / low)) + 1)]


def rounded(rate: float) -> float:
    """Return a rate with three digits."""
    return float(f"{rate:.3g}")


def rate_table(every: Sequence[Grid]) -> list[str]:
    """Return a table with the grids of LoRA and of full fine-tuning."""
    heads = " | ".join(f"{octaves:+g}".replace("-", "−") for octaves in DISTANCES)
    lines = [
        f"| loss above the best, by octaves from the best rate | seeds | best rate | × LoRA's | {heads} |",
        "|---|---|---|---|" + "---|" * len(DISTANCES),
    ]
    lora = {grid.title: grid.best for grid in every if grid.arm == LORA}
    for grid in every:
        if grid.arm in (LORA, FULL):
            relative = f"{grid.best / lora[grid.title]:.2f}" if grid.title in lora else ""
            cells = [shown_rise(grid.at(octaves)) for octaves in DISTANCES]
            name = f"{grid.title}: {grid.arm}"
            lines.append(f"| {name} | {grid.seeds} | {grid.best:.3g} | {relative} | {' | '.join(cells)} |")
    return lines


def sides(every: Sequence[Grid]) -> list[str]:
    """Return, for each distance, how the rates below and above the best one compare over all grids."""
    lines = []
    for octaves in (distance for distance in DISTANCES if distance > 0):
        below, above = ([rise for grid in every if (rise := grid.at(side)) is not None] for side in (-octaves, octaves))
        both = [(grid.at(-octaves), grid.at(octaves)) for grid in every]
        pairs = [(low, high) for low, high in both if low is not None and high is not None]
        if not below and not above:
            continue
        words = {0.5: "Half an octave", 1.0: "An octave"}.get(octaves, f"{octaves:g} octaves")
        line = f"- **{words}** from the best rate: {_side(below, 'below it')}, {_side(above, 'above it')}."
        if pairs:
            worse = sum(high > low for low, high in pairs)
            line += f" Above costs more than below in {worse} of the {counted(len(pairs), 'grid')} with both."
        lines.append(line)
    far = [rise for grid in every if (rise := grid.at(2.0)) is not None]
    failed = sum(rise > FAILED for rise in far)
    if 2 * failed > len(far):
        lines += ["", "So try both neighbours of the best rate, and do not go far above it."]
    return lines


def best_rates(every: Sequence[Grid]) -> list[str]:
    """Return the ranges of LoRA's best rates, and of full fine-tuning's as shares of LoRA's on the same task."""
    lora = {grid.title: grid.best for grid in every if grid.arm == LORA}
    shares = [grid.best / lora[grid.title] for grid in every if grid.arm == FULL and grid.title in lora]
    text = f"LoRA's best rate was {min(lora.values()):g} to {max(lora.values()):g}, by task and number of steps"
    if shares:
        text += f"; full fine-tuning's was {min(shares):.2f} to {max(shares):.2f} of LoRA's"
    return [f"{text}. The ratio of other methods is in the table above."]


def shown_rise(rise: float | None) -> str:
    """Return a loss above the best as the page has it; empty if there is none."""
    if rise is None:
        return ""
    return "diverged" if math.isinf(rise) else f"{rise:+.4f}" if rise < FAILED else f"**{rise:+.2f}**"


def _side(rises: Sequence[float], where: str) -> str:
    if not rises:
        return f"not tried {where}"
    failed = sum(rise > FAILED for rise in rises)
    failures = f"; training failed in {failed}" if failed else ""
    return f"{statistics.median(rises):+.4f} {where} (median of {counted(len(rises), 'grid')}{failures})"
