"""Full fine-tuning: every weight is trained, or those of named modules."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from nalora.errors import NALoRAError
from nalora.methods.method import Adapter, Method, Start
from nalora.models.target_modules import matching_modules


@dataclass(frozen=True)
class Full(Method):
    """The model itself is trained, without an adapter.

    Args:
        trained_modules: names or name endings of the modules whose weights are trained, or ``all-linear`` for all
            linear layers except the head (default: every weight, with embeddings, head and norms).
    """

    name = "full"
    title = "full fine-tuning"
    reference = "–"
    trains_the_model = True
    not_under_na_lora = "there is no adapter whose steps could be controlled"

    trained_modules: str | list[str] | None = None

    def prepare(self, model: nn.Module, adapter: Adapter, start: Start) -> nn.Module:
        """Make the weights trainable, in float32 or wider; all others are frozen, in float32 as well.

        Raises NALoRAError for quantised weights, and for a name that no module has.

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
        if self.trained_modules is None:
            return model.requires_grad_(True)
        model.requires_grad_(False)
        for name in matching_modules(model, self.trained_modules, "trained_modules"):
            model.get_submodule(name).requires_grad_(True)
        return model


METHODS = (Full,)
