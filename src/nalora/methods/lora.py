"""LoRA: W₀ + (α/r)·B·A with A drawn and B = 0."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nalora.methods.method import Adapter, Method


@dataclass(frozen=True)
class LoRA(Method):
    """PEFT's LoRA, its adapters in float32 whatever the base is held in."""

    name = "lora"
    title = "LoRA"
    reference = "Hu et al. 2021, arXiv 2106.09685"

    def prepare(self, model: nn.Module, adapter: Adapter, seed: int) -> nn.Module:
        """Freeze the base and add one adapter to each target layer, the same for the same seed."""
        import peft

        torch.manual_seed(seed)
        wrapped: nn.Module = peft.get_peft_model(model, self.config(adapter))
        return wrapped

    def config(self, adapter: Adapter) -> Any:
        """PEFT's configuration."""
        import peft

        return peft.LoraConfig(
            r=adapter.rank,
            lora_alpha=adapter.alpha,
            lora_dropout=adapter.dropout,
            target_modules=adapter.target_modules,
        )


METHOD = LoRA
