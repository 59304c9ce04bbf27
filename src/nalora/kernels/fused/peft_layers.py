"""What a fused layer must know of PEFT's: when one plain adapter acts, what lies frozen below, how to stand in."""

from __future__ import annotations

from collections.abc import Callable

import torch
from peft.tuners.lora import layer as peft_layer
from torch import Tensor, nn

# A frozen weight [out, in] in the dtype asked for: kept as it is, or unpacked from 4 bits for the moment.
Weight = Callable[[torch.dtype], Tensor]


def only_adapter(layer: nn.Module) -> tuple[Tensor, Tensor, float] | None:
    """(A, B, scaling) where exactly one plain adapter acts on the layer, else None."""
    if layer.disable_adapters or layer.merged:
        return None
    active = [name for name in layer.active_adapters if name in layer.lora_A]
    if len(active) != 1 or active[0] in layer.lora_variant:
        return None
    (name,) = active
    dropout, a, b = layer.lora_dropout[name], layer.lora_A[name], layer.lora_B[name]
    if (layer.training and getattr(dropout, "p", 0)) or b.bias is not None:
        return None
    return a.weight, b.weight, layer.scaling[name]


def frozen_weight(layer: nn.Module) -> Weight | None:
    """How to read the frozen weight under a LoRA layer, None where it learns or is of a kind not known here."""
    base = getattr(layer, "base_layer", None)
    if base is None or any(parameter.requires_grad for parameter in base.parameters()):
        return None
    if type(layer) is peft_layer.Linear and type(base) is nn.Linear:
        return lambda dtype: base.weight.to(dtype)
    # PEFT's own Linear stands over a 4-bit layer too, where transformers did not quantise the model.
    if type(layer).__name__ in ("Linear", "Linear4bit") and type(base).__name__ == "Linear4bit":
        from bitsandbytes.functional import dequantize_4bit

        return lambda dtype: dequantize_4bit(base.weight.data, base.weight.quant_state).to(dtype)
    return None


def replace_forward(module: nn.Module, forward: Callable[..., Tensor]) -> Callable[[], None]:
    """Give this one module another forward; the result gives it back its own."""
    before = vars(module).get("forward")
    module.forward = forward

    def put_back() -> None:
        if before is None:
            del module.forward
        else:
            module.forward = before

    return put_back
