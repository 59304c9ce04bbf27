"""Full fine-tuning: every weight learns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from nalora.errors import NALoRAError
from nalora.methods.method import Adapter, Method, Start


@dataclass(frozen=True)
class Full(Method):
    """The model itself, whole."""

    name = "full"
    title = "full fine-tuning"
    reference = "–"
    trains_the_model = True
    not_under_na_lora = "there is no adapter whose steps could be controlled"

    def prepare(self, model: nn.Module, adapter: Adapter, start: Start) -> nn.Module:
        """Let every weight learn, in at least float32.

        A step of 2e-5 is less than half of what bfloat16 can tell apart around 0.02: added to 16-bit weights most of
        training would be rounded away. Under the Trainer's autocast products are still computed in 16 bits.

        Raises:
            NALoRAError: the weights are quantised.
        """
        if getattr(model, "is_quantized", False):
            raise NALoRAError(
                "method 'full'",
                found="a quantised model",
                expected="weights that can learn",
                fix="leave quantise out, or train an adapter",
            )
        for parameter in model.parameters():
            if parameter.dtype in (torch.bfloat16, torch.float16):
                parameter.data = parameter.data.float()
        return model.requires_grad_(True)


METHODS = (Full,)
