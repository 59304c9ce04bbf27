"""Full fine-tuning: every weight learns."""

from __future__ import annotations

from dataclasses import dataclass

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
        """Let every weight learn.

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
        return model.requires_grad_(True)


METHODS = (Full,)
