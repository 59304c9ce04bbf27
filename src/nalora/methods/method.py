"""What a training method is: its work before training, its optimizer, its work at every step, what it saves."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer

from nalora.methods.saving import save_adapter

Batch = Mapping[str, Tensor]


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
class Start:
    """What a method may use before the first step.

    Args:
        seed: of everything it draws.
        steps: how many optimizer steps the run will take.
        batches: the first n batches of the training set, each of as many rows as an optimizer step trains on; of every
            batch this process's share, in passes of the size that training takes. The same at every call.
        passes: how many passes a batch has.
        folder: exists; what a resumed run must find again of the start is kept there.
        cache: where results that took long are kept by their content, for other runs.
        report: hears (what, done, total) on long work.
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
    """A subclass is a frozen dataclass: its fields are the settings that a run may give beside the adapter's."""

    name: ClassVar[str]
    title: ClassVar[str]
    reference: ClassVar[str]
    # Whether the model itself learns, so that it is what is saved; else an adapter is.
    trains_the_model: ClassVar[bool] = False
    # Why NA-LoRA cannot control this method's steps; None where it can.
    not_under_na_lora: ClassVar[str | None] = None

    @classmethod
    def options(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of this method by name, with their types; `given` is all that the run says."""
        types = typing.get_type_hints(cls)
        return {field.name: types[field.name] for field in dataclasses.fields(cls)}

    @classmethod
    def build(cls, **settings: Any) -> Method:
        """The method with these settings.

        Raises:
            NALoRAError: a setting out of range, or settings that make no sense together.
        """
        return cls(**settings)

    def settings(self) -> dict[str, Any]:
        """All settings with their values, flat."""
        return dataclasses.asdict(self)

    def defaults(self) -> dict[str, Any]:
        """The values of the settings that a run does not give."""
        return {field.name: field.default for field in dataclasses.fields(self)}

    def prepare(self, model: nn.Module, adapter: Adapter, start: Start) -> nn.Module:
        """The model as it is trained: wrapped, initialised, the rest frozen.

        Raises:
            NALoRAError: a model or an adapter that the method cannot train.
        """
        raise NotImplementedError

    def optimizer(self, trainer: Any) -> Optimizer | None:
        """The method's own optimizer for a `transformers.Trainer`'s model; None for the one the run names."""
        return None

    def attach(self, trainer: Any) -> None:
        """What happens at every step, hung on a `transformers.Trainer` before it trains."""

    def trainable_parameters(self, model: nn.Module) -> int:
        """How many numbers are trained."""
        return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)

    def save(self, model: nn.Module, folder: Path) -> None:
        """Write what was trained, such that it loads on the stock base model with stock libraries.

        Layers of different ranks or scalings are written with one of each: other readers than PEFT know no patterns.

        Every process calls it, for each may hold a share of the parameters; the first one writes.
        """
        save_adapter(model, folder)
