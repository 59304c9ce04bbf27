"""Full fine-tuning: every weight is trained."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from nalora.errors import NALoRAError
from nalora.methods.method import Adapter, Method, Start


@dataclass(frozen=True)
class Full(Method):
    """The whole model is trained, without an adapter."""

    name = "full"
    title = "full fine-tuning"
    reference = "–"
    trains_the_model = True
    not_under_na_lora = "there is no adapter whose steps could be controlled"

    def prepare(self, model: nn.Module, adapter: Adapter, start: Start) -> nn.Module:
        """Make every weight trainable, in float32 or wider. Raises NALoRAError for quantised weights.

        A step of 2e-5 is less than half the spacing of bfloat16 values around 0.02, so 16-bit weights would round most
        of the training away. Under the Trainer's autocast, products are still computed in 16 bits.
        """
        if getattr(model, "is_quantized", False):
            raise NALoRAError(
                "method 'full'",
                found="a quantised model",
                expected="weights that can be trained",
                fix="leave quantise out, or train an adapter",
            )
        for parameter in model.parameters():
            if parameter.dtype in (torch.bfloat16, torch.float16):
                parameter.data = parameter.data.float()
        return model.requires_grad_(True)


METHODS = (Full,)
