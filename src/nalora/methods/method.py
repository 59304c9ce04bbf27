"""What a training method is: what it does to the model before training, and during it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn


@dataclass(frozen=True)
class Adapter:
    """The LoRA adapter that a run asks for; full fine-tuning has none.

    Args:
        rank: r.
        alpha: α; the LoRA scaling is α/r.
        dropout: on the adapter's input.
        target_modules: names or endings of layers, or ``all-linear`` for all but the head.
    """

    rank: int = 8
    alpha: float = 16
    dropout: float = 0.0
    target_modules: str | list[str] = "all-linear"


@dataclass(frozen=True)
class Method:
    """A subclass is a frozen dataclass: its fields are the settings that a run may give beside the adapter's."""

    name: ClassVar[str]
    title: ClassVar[str]
    reference: ClassVar[str]
    # Whether the model itself learns, so that it is what is saved; else an adapter is.
    trains_the_model: ClassVar[bool] = False

    @classmethod
    def options(cls) -> dict[str, dataclasses.Field[Any]]:
        """The settings of this method by name."""
        return {field.name: field for field in dataclasses.fields(cls)}

    def prepare(self, model: nn.Module, adapter: Adapter, seed: int) -> nn.Module:
        """The model as it is trained: wrapped, initialised, the rest frozen."""
        raise NotImplementedError

    def attach(self, trainer: Any) -> None:
        """What happens at every step, hung on a `transformers.Trainer` before it trains."""
