"""LoRA at NA-LoRA's mean step: what is left of the method when its factors no longer know channel, layer or time."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from nalora.config import PROJECTIONS
from nalora.errors import NALoRAError, require
from nalora.methods.applied_factors import mean_applied_factors
from nalora.methods.lora import LoRA
from nalora.methods.method import Adapter, Start
from nalora.methods.optimizers import named_optimizer

_FACTORS = (*(f"{name}_scale" for name in PROJECTIONS), "mask_mean")


@dataclass(frozen=True)
class LoRAScaled(LoRA):
    """LoRA whose FFN adapters learn at constant multiples of the learning rate.

    Args:
        like: the folder of an NA-LoRA run; the mean step scales and the mean mask that it applied are taken, steps
            weighted by their learning rate. What the run only followed counts as 1.
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
            require(getattr(self, name) > 0, name, getattr(self, name), "a positive number", "raise it")
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
            NALoRAError: no such run, one without NA-LoRA's metrics, or one in which no factor acted.
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
            NALoRAError: no such run, one without NA-LoRA's metrics, or one in which no factor acted.
        """
        if self.like is None:
            return self
        means = mean_applied_factors(Path(self.like))
        ours = {f"{name}_scale": means[f"scale_{name}"] for name in PROJECTIONS} | {"mask_mean": means["mask_mean"]}
        if all(value == 1.0 for value in ours.values()):
            raise NALoRAError(
                f"like: {self.like}",
                found="a run in which every mean factor is 1: neither mask nor step scales changed the mean step",
                expected="a run whose mask or step scales acted",
                fix="use method=lora, which is the same",
            )
        return dataclasses.replace(self, like=None, **ours)


def multiples_of(model: nn.Module, factors: LoRAScaled) -> dict[nn.Parameter, float]:
    """Each FFN adapter parameter's multiple of the learning rate; what is not there has 1.

    Where gate and up are one layer, its A and B have the mean of both: a parameter has one learning rate.
    """
    from nalora.control.blocks import find_blocks
    from nalora.control.parameters import active_adapters

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
