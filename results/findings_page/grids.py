"""The optimum between the learning rates of a grid, by a parabola through the best rate and its neighbours."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from tables.stored_answers import answer_of, named


class Optimum(NamedTuple):
    """The minimum of the parabola."""

    rate: float
    loss: float


def optimum(losses: Mapping[float, float]) -> Optimum | None:
    """Return the minimum of the parabola in log₂(rate) through the best rate and its neighbours.

    None if the best rate is at an end of the grid or a neighbour diverged.
    """
    rates = sorted(losses)
    best = min(rates, key=lambda rate: losses[rate])
    place = rates.index(best)
    if place in (0, len(rates) - 1) or not all(math.isfinite(losses[rate]) for rate in rates[place - 1 : place + 2]):
        return None
    left, right = (math.log2(rates[place + side] / best) for side in (-1, 1))
    # y = y₀ + b·x + c·x² through (left, rise_left), (0, 0) and (right, rise_right).
    rise_left, rise_right = (losses[rates[place + side]] - losses[best] for side in (-1, 1))
    curvature = (rise_left / left - rise_right / right) / (left - right)
    slope = rise_left / left - curvature * left
    x = -slope / (2 * curvature)
    return Optimum(best * 2**x, losses[best] - slope**2 / (4 * curvature))


def grids(results: Path) -> list[str]:
    """Return a table of the chosen rates and of the optima between the rates, for LoRA and all arms of NA-LoRA."""
    columns = (("gsm8k", "GSM8K, an octave apart"), ("caesar", "cipher, an octave apart"),
               ("equal-cost", "GSM8K, half an octave apart, 3 seeds"))  # fmt: skip
    parts = {title: answer_of(results, name) for name, title in columns}
    arms = [arm for arm in parts[columns[0][1]]["learning_rates"] if arm.startswith(("lora", "na-lora", "control"))]
    arms = [arm for arm in arms if arm not in ("lora+", "lora-ga", "lora-pro")]
    lines = [f"| chosen rate → optimum (loss left on the table) | {' | '.join(parts)} |", "|---|" + "---|" * len(parts)]
    for arm in arms:
        lines.append(f"| {named(arm)} | {' | '.join(_cell(part, arm) for part in parts.values())} |")
    return lines


def screened(part: Mapping[str, Mapping[str, Mapping[str, float | str]]], arm: str) -> dict[float, float]:
    """Return the validation losses of an arm by rate, infinite where training diverged."""
    losses = part["validation_losses"][arm]
    return {float(rate): loss if isinstance(loss, float) else math.inf for rate, loss in losses.items()}


def _cell(part: dict[str, dict[str, dict[str, float | str]]], arm: str) -> str:
    if arm not in part["validation_losses"]:
        return ""
    losses = screened(part, arm)
    chosen = min(losses, key=lambda rate: losses[rate])
    best = optimum(losses)
    return f"{chosen:.3g}" if best is None else f"{chosen:.3g} → {best.rate:.2g} ({losses[chosen] - best.loss:.4f})"
