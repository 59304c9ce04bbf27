"""LoRA+: B learns with a rate λ times that of A."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from nalora.errors import require
from nalora.methods.lora import LoRA
from nalora.methods.optimizers import named_optimizer


@dataclass(frozen=True)
class LoRAPlus(LoRA):
    """LoRA under two learning rates.

    Args:
        ratio: λ; the run's learning rate is that of A.
    """

    name = "lora+"
    title = "LoRA+"
    reference = "Hayou et al. 2024, arXiv 2402.12354"

    ratio: float = 16.0

    def __post_init__(self) -> None:
        require(self.ratio > 0, "ratio", self.ratio, "λ > 0", "16 is the paper's")

    def optimizer(self, trainer: Any) -> Optimizer:
        """The run's optimizer, with B at λ times the learning rate."""
        return lora_plus_optimizer(trainer, self.ratio)


def lora_plus_groups(model: nn.Module, lr: float, ratio: float, weight_decay: float) -> list[dict[str, Any]]:
    """What learns, in two parameter groups: B at `ratio` times `lr`, and all else at `lr`.

    DoRA's μ is among the rest. PEFT's own LoRA+ raises every vector's learning rate along with B's.
    """
    b: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (b if ".lora_B." in name else rest).append(parameter)
    return [
        {"params": rest, "lr": lr, "weight_decay": weight_decay},
        {"params": b, "lr": ratio * lr, "weight_decay": weight_decay},
    ]


def lora_plus_optimizer(trainer: Any, ratio: float) -> Optimizer:
    """The optimizer that a `transformers.Trainer`'s arguments name, over LoRA+'s groups.

    Raises:
        NALoRAError: an optimizer that makes its own parameter groups.
    """
    args = trainer.args
    return named_optimizer(trainer, lora_plus_groups(trainer.model, args.learning_rate, ratio, args.weight_decay))


METHODS = (LoRAPlus,)
