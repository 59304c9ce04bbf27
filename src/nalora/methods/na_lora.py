"""NA-LoRA: LoRA with its steps controlled by what the FFN gates do."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from nalora.config import NALoRAConfig
from nalora.methods.lora import LoRA


@dataclass(frozen=True)
class NALoRA(LoRA):
    """LoRA's adapter, `nalora.attach_trainer` around its training; the fields are `NALoRAConfig`'s."""

    name = "na-lora"
    title = "NA-LoRA"
    reference = "Nonlinearity-Aware LoRA: Structured Gate Adaptation under Low-Rank Constraints"

    keep_ratio: float = 0.30
    sharpness: float = 20.0
    mask_ema: float = 0.90
    positive_penalty: float = 1.0
    scale_ema: float = 0.95
    mask: bool = True
    scaling: bool = True
    importance: Literal["derivative", "utility"] = "derivative"
    preserve_mean: bool = False
    regimes: Literal["paper", "derived"] = "paper"
    apply_to: Literal["gradient", "update"] = "gradient"
    start: Literal["ones", "first"] = "ones"
    kernels: Literal["auto", "off", "fused", "fused-activation"] = "auto"

    def attach(self, trainer: Any) -> None:
        """Control the trainer's steps; gate metrics stand in its logs, the state in its checkpoints."""
        from nalora.integrations.trainer import attach_trainer

        attach_trainer(trainer, self.nalora_config(), kernels=self.kernels)

    def nalora_config(self) -> NALoRAConfig:
        """The settings that are the controller's."""
        settings = dataclasses.asdict(self)
        settings.pop("kernels")
        return NALoRAConfig(**settings)

    def __post_init__(self) -> None:
        self.nalora_config()


METHOD = NALoRA
