"""What docs/choosing.md says to start with: method, variant to try, rank, learning rates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tables.arm_states import LORA
from tables.stored_answers import study

from choosing_page.method_choice import STUDY, Choice, chosen
from choosing_page.rate_losses import GRIDS, Grid, grids, rates_to_try, rounded, start_rate


class Start(NamedTuple):
    """What the page recommends.

    Attributes:
        method: to start with.
        variant: to try next, if the answers name one.
        settings: of the comparison of methods: model, rank, alpha, batch size.
        of_lora: LoRA's grids.
        rate: LoRA's rate to start with.
        rise: its largest loss above the best rate of a grid.
        rates: LoRA's rates to search.
    """

    method: Choice
    variant: Choice | None
    settings: dict[str, Any]
    of_lora: Sequence[Grid]
    rate: float
    rise: float
    rates: Sequence[float]

    def rates_of(self, choice: Choice, rates: Sequence[float]) -> list[float]:
        """Return LoRA's rates, moved by the distance of the method's best rate from LoRA's in the study of methods."""
        lora = next((grid.best for grid in self.of_lora if grid.title == GRIDS[STUDY]), None)
        if choice.state is None or choice.state.rate is None or lora is None:
            return list(rates)
        half_octaves = round(2 * math.log2(choice.state.rate / lora))
        return [rounded(rate * 2 ** (half_octaves / 2)) for rate in rates]

    @property
    def first_rate(self) -> float:
        """The rate to start with for the method to start with."""
        return self.rates_of(self.method, [self.rate])[0]

    @property
    def searched(self) -> list[float]:
        """The rates to search for the method to start with."""
        return self.rates_of(self.method, self.rates)


def start(results: Path) -> Start:
    """Return the recommendation that follows from the stored answers."""
    method, variant = chosen(results)
    of_lora = [grid for grid in grids(results) if grid.arm == LORA]
    rate, rise = start_rate(of_lora)
    return Start(method, variant, dict(study(STUDY).settings), of_lora, rate, rise, rates_to_try(of_lora))
