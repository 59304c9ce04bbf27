"""LoRA at NA-LoRA's mean step: what is left of the method when its factors no longer know channel, layer or time."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from nalora.errors import NALoRAError
from nalora.methods.lora import LoRA
from nalora.methods.method import Adapter, Start
from nalora.methods.optimizers import named_optimizer

_PROJECTIONS = ("gate", "up", "down")
_FACTORS = (*(f"{name}_scale" for name in _PROJECTIONS), "mask_mean")


@dataclass(frozen=True)
class LoRAScaled(LoRA):
    """LoRA whose FFN adapters learn at constant multiples of the learning rate.

    Args:
        like: the folder of an NA-LoRA run; its mean step scales and mean mask are taken, steps by their learning rate.
        gate_scale: the gate projection's multiple.
        up_scale: the up projection's.
        down_scale: the down projection's.
        mask_mean: a further multiple for the gate's B.
    """

    name = "lora-scaled"
    title = "LoRA at learning rate × NA-LoRA's mean factors"
    reference = "control"

    like: str | None = None
    gate_scale: float = 1.0
    up_scale: float = 1.0
    down_scale: float = 1.0
    mask_mean: float = 1.0

    def __post_init__(self) -> None:
        for name in _FACTORS:
            if not getattr(self, name) > 0:
                raise NALoRAError(name, found=repr(getattr(self, name)), expected="a positive number", fix="raise it")
        given = any(getattr(self, name) != 1.0 for name in _FACTORS)
        if given == (self.like is not None):
            raise NALoRAError(
                "method 'lora-scaled'",
                found="both `like` and factors" if given else "neither `like` nor a factor other than 1",
                expected="one of them",
                fix="give like=FOLDER of an NA-LoRA run, or gate_scale, up_scale, down_scale and mask_mean",
            )

    def prepare(self, model: nn.Module, adapter: Adapter, start: Start) -> nn.Module:
        """As LoRA, once it is known that there are factors.

        Raises:
            NALoRAError: no such run, or one without NA-LoRA's metrics.
        """
        self.factors()
        return super().prepare(model, adapter, start)

    def optimizer(self, trainer: Any) -> Optimizer:
        """The run's optimizer, a group for each multiple."""
        factors = self.factors()
        multiples = multiples_of(trainer.model, factors)
        rate, decay = trainer.args.learning_rate, trainer.args.weight_decay
        groups: dict[float, list[nn.Parameter]] = {}
        for parameter in trainer.model.parameters():
            if parameter.requires_grad:
                groups.setdefault(multiples.get(parameter, 1.0), []).append(parameter)
        return named_optimizer(
            trainer, [{"params": each, "lr": m * rate, "weight_decay": decay} for m, each in groups.items()]
        )

    def factors(self) -> LoRAScaled:
        """The multiples, read from the other run where there is one.

        Raises:
            NALoRAError: no such run, or one without NA-LoRA's metrics.
        """
        if self.like is None:
            return self
        file = Path(self.like) / "metrics.jsonl"
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.is_file() else []
        names = {f"{each}_scale": f"nalora/scale_{each}" for each in _PROJECTIONS} | {"mask_mean": "nalora/mask_mean"}
        logged = [row for row in rows if all(isinstance(row.get(theirs), int | float) for theirs in names.values())]
        if not logged:
            raise NALoRAError(
                f"like: {self.like}",
                found="no metrics of NA-LoRA" if file.is_file() else "no metrics.jsonl",
                expected="the folder of a finished NA-LoRA run",
                fix="train one first, with method=na-lora",
            )
        weights = _weights(logged)
        means = {
            ours: sum(weight * row[theirs] for weight, row in zip(weights, logged, strict=True)) / sum(weights)
            for ours, theirs in names.items()
        }
        return dataclasses.replace(self, like=None, **means)


def _weights(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """How much of the way a row stands for: its learning rate times the steps since the row before.

    In warmup the mask is still whole and the steps are small; a plain mean over rows would count them as any other.
    """
    steps = [row["step"] for row in rows]
    weights = [
        row["learning_rate"] * (step - before) for row, before, step in zip(rows, [0, *steps], steps, strict=False)
    ]
    return weights if sum(weights) > 0 else [1.0] * len(rows)


def multiples_of(model: nn.Module, factors: LoRAScaled) -> dict[nn.Parameter, float]:
    """Each FFN adapter parameter's multiple of the learning rate; what is not there has 1.

    Where gate and up are one layer, its A and B have the mean of both: a parameter has one learning rate.
    """
    from nalora.blocks import find_blocks
    from nalora.controlled import active_adapters

    multiples: dict[nn.Parameter, float] = {}
    for block in find_blocks(model).blocks:
        found: dict[nn.Parameter, list[float]] = {}
        for name, projection in block.projections.items():
            scale = getattr(factors, f"{name}_scale")
            for _, a, b in active_adapters(projection.module):
                found.setdefault(a, []).append(scale)
                found.setdefault(b, []).append(scale * (factors.mask_mean if name == "gate" else 1.0))
        multiples |= {parameter: sum(each) / len(each) for parameter, each in found.items()}
    return multiples


METHODS = (LoRAScaled,)
