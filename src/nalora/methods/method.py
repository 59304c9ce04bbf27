"""The interface of a training method: preparing the model, its optimizer, its work at every step, and saving."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer

from nalora.errors import require
from nalora.methods.saving import save_adapter

Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class Adapter:
    """The LoRA adapter of a run; full fine-tuning does not use it.

    Args:
        rank: r.
        alpha: α; the LoRA scaling is α/r.
        dropout: dropout probability of the adapter's input.
        target_modules: names or name endings of layers, or ``all-linear`` for all linear layers except the head.
        target_parameters: names or name endings of parameters to adapt as well, such as those of experts.
    """

    rank: int = 8
    alpha: float = 16
    dropout: float = 0.0
    target_modules: str | list[str] = "all-linear"
    target_parameters: list[str] | None = None


@dataclass(frozen=True)
class Start:
    """What a method can use before the first step.

    Args:
        seed: seed of all random numbers.
        steps: number of optimizer steps of the run.
        batches: returns the first n batches of the training set. A batch has as many rows as one optimizer step; this
            process gets its share of it, in passes of the size used in training. Every call returns the same batches.
        passes: number of passes per batch.
        folder: existing folder for data that a resumed run needs again.
        cache: folder for results that other runs can reuse, named by a hash of their inputs.
        report: called with (description, done, total) during long computations.
    """

    seed: int = 0
    steps: int = 1
    batches: Callable[[int], Iterable[Batch]] = lambda n: ()
    passes: int = 1
    folder: Path | None = None
    cache: Path | None = None
    report: Callable[[str, int, int], None] = lambda what, done, total: None


@dataclass(frozen=True)
class Method:
    """Base class of all methods. Subclasses are frozen dataclasses whose fields are settings of a run."""

    name: ClassVar[str]
    title: ClassVar[str]
    reference: ClassVar[str]
    # Whether the base model is trained and saved, not an adapter.
    trains_the_model: ClassVar[bool] = False
    # Why NA-LoRA cannot control this method's steps; None where it can.
    not_under_na_lora: ClassVar[str | None] = None

    @classmethod
    def options(cls, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the type of each setting of this method; `settings` are all settings of the run."""
        types = typing.get_type_hints(cls)
        return {field.name: types[field.name] for field in dataclasses.fields(cls)}

    @classmethod
    def build(cls, **settings: Any) -> Method:
        """Return the method with these settings. Raises NALoRAError for values that are out of range."""
        return cls(**settings)

    def settings(self) -> dict[str, Any]:
        """Return the values of all settings, without nesting."""
        return dataclasses.asdict(self)

    def defaults(self) -> dict[str, Any]:
        """Return the default values of all settings."""
        return {field.name: field.default for field in dataclasses.fields(self)}

    def prepare(self, model: nn.Module, adapter: Adapter, start: Start) -> nn.Module:
        """Return the model ready for training: wrapped, initialised, with all other parameters frozen.

        Raises NALoRAError if the method cannot train this model or adapter.
        """
        raise NotImplementedError

    def optimizer(self, trainer: Any) -> Optimizer | None:
        """Return the method's own optimizer for a `transformers.Trainer`, or None for the one the run names."""
        return None

    def attach(self, trainer: Any) -> None:
        """Add callbacks and hooks to a `transformers.Trainer` before it trains."""

    def trainable_parameters(self, model: nn.Module) -> int:
        """Return the number of trained values."""
        return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)

    def save(self, model: nn.Module, folder: Path) -> None:
        """Write the trained weights so that stock libraries load them on the stock base model.

        Every process must call it, since each can hold a shard of the parameters; the first process writes.
        """
        save_adapter(model, folder)


def check_settings(method: Method, *rules: tuple[str, bool, str]) -> None:
    """Raise NALoRAError for the first of the rules (setting, whether its value is valid, valid values) that fails."""
    for setting, valid, expected in rules:
        require(valid, setting, getattr(method, setting), expected)


def check_positive(method: Method, *settings: str) -> None:
    """Raise NALoRAError for the first of the settings that is not above zero."""
    check_settings(method, *((name, getattr(method, name) > 0, "a positive number") for name in settings))
