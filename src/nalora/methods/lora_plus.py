"""LoRA+: the learning rate of B is λ times that of A."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from nalora.methods.lora import LoRA
from nalora.methods.method import check_settings
from nalora.methods.optimizers import named_optimizer


@dataclass(frozen=True)
class LoRAPlus(LoRA):
    """LoRA with two learning rates.

    Args:
        ratio: λ; the run's learning rate is that of A.
    """

    name = "lora+"
    title = "LoRA+"
    reference = "Hayou et al. 2024, arXiv 2402.12354"

    ratio: float = 16.0

    def __post_init__(self) -> None:
        check_settings(self, ("ratio", self.ratio > 0, "λ > 0 (the paper uses 16)"))

    def optimizer(self, trainer: Any) -> Optimizer | None:
        """Return the run's optimizer with λ times the learning rate for B.

        Raises NALoRAError for an optimizer that makes its own parameter groups.
        """
        args = trainer.args
        groups = lora_plus_groups(trainer.model, args.learning_rate, self.ratio, args.weight_decay)
        return named_optimizer(trainer, groups)


def lora_plus_groups(model: nn.Module, lr: float, ratio: float, weight_decay: float) -> list[dict[str, Any]]:
    """Return two parameter groups: B with `ratio` times `lr`, and all other trainable parameters with `lr`.

    DoRA's μ is in the second group. PEFT's own LoRA+ also raises the learning rate of every vector.
    """
    trainable = [(".lora_B." in name, p) for name, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [p for is_b, p in trainable if not is_b], "lr": lr, "weight_decay": weight_decay},
        {"params": [p for is_b, p in trainable if is_b], "lr": ratio * lr, "weight_decay": weight_decay},
    ]


METHODS = (LoRAPlus,)
