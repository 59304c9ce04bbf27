"""The controls that evidence needs: NA-LoRA with one of its parts off, at random, or in another form.

An arm that beats LoRA shows little unless it also beats these: they have the same cost, the same state and the same
histogram of factors, without the part that the paper says matters.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from nalora.methods.na_lora import NALoRA


@dataclass(frozen=True)
class Off(NALoRA):
    """Observed and decided, nothing multiplied: must be LoRA to the last bit."""

    name = "na-lora-off"
    title = "NA-LoRA, both controls off"
    reference = "control"

    mask: bool = False
    scaling: bool = False


@dataclass(frozen=True)
class RandomMask(NALoRA):
    """The learned mask's values on channels drawn once: its histogram without its choice."""

    name = "na-lora-random"
    title = "NA-LoRA, the mask's values on random channels"
    reference = "control"

    mask_channels: Literal["learned", "shuffled", "frozen"] = "shuffled"

    def attach(self, trainer: Any) -> None:
        """Draw by the run's seed, unless one is given."""
        drawn = self if self.mask_seed else dataclasses.replace(self, mask_seed=1 + int(trainer.args.seed))
        super(RandomMask, drawn).attach(trainer)


@dataclass(frozen=True)
class FrozenMask(NALoRA):
    """The first observation's mask, for good."""

    name = "na-lora-frozen"
    title = "NA-LoRA, mask decided once"
    reference = "control"

    mask_channels: Literal["learned", "shuffled", "frozen"] = "frozen"


@dataclass(frozen=True)
class MeanPreserving(NALoRA):
    """The mask divided by its mean: it moves the gate's step between channels and does not shrink it."""

    name = "na-lora-mean"
    title = "NA-LoRA, the mask's mean preserved"
    reference = "control"

    preserve_mean: bool = True


@dataclass(frozen=True)
class Utility(NALoRA):
    """Channels ranked by E|φ′(z)|·|u|, the whole factor in the gate's gradient."""

    name = "na-lora-utility"
    title = "NA-LoRA, mask by E|φ′(z)|·|u|"
    reference = "control"

    importance: Literal["derivative", "utility"] = "utility"


METHODS = (Off, RandomMask, FrozenMask, MeanPreserving, Utility)
