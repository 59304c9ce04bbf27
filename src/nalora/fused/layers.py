"""Put fused layers in the place of PEFT's for the length of a training run, and take them out again.

A fused layer stands in only while it computes the same thing: one plain LoRA adapter without dropout, not merged, not
disabled, with gradients on. In every other call the module's own forward runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from peft.tuners.lora import layer as peft_layer
from torch import Tensor, nn

from nalora.blocks import FFNBlock
from nalora.fused.gated import GateSpec
from nalora.fused.lora_ffn import LoRAFFN, Weights
from nalora.fused.lora_linear import LoRALinear, Weight
from nalora.observer import GateObserver
from nalora.statistics.triton_activations import number_and_limit
from nalora.statistics.triton_engine import as_bytes


def fuse_linear(layer: nn.Module) -> Callable[[], None] | None:
    """Compute a LoRA linear layer as one function; the result puts PEFT's own forward back. None: cannot be fused."""
    weight = frozen_weight(layer)
    if weight is None:
        return None
    original = layer.forward

    @functools.wraps(original)
    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        adapter = only_adapter(layer)
        if adapter is None or args or kwargs or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return original(x, *args, **kwargs)
        a, b, scaling = adapter
        return LoRALinear.apply(x, a, b, layer.base_layer.bias, weight, scaling)

    return replace_forward(layer, forward)


def fuse_ffn(host: nn.Module, block: FFNBlock, observer: GateObserver) -> Callable[[], None] | None:
    """Compute a whole gated FFN as one function; the result puts the module's own forward back."""
    known = number_and_limit(block.activation)
    if known is None or block.up is None or block.fused:
        return None
    layers = (block.gate.module, block.up.module, block.down.module)
    frozen = [frozen_weight(layer) for layer in layers]
    if None in frozen or any(layer.base_layer.bias is not None for layer in layers):
        return None
    spec = GateSpec(*known, *observer.thresholds, block.up_offset, observer.with_up)
    original = host.forward

    @functools.wraps(original)
    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        adapters = [only_adapter(layer) for layer in layers]
        if None in adapters or args or kwargs or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return original(x, *args, **kwargs)
        (a_gate, b_gate, s_gate), (a_up, b_up, s_up), (a_down, b_down, s_down) = adapters
        if not a_gate.shape[0] == a_up.shape[0] == a_down.shape[0]:
            return original(x, *args, **kwargs)
        mask = as_bytes(observer.token_mask.of(x.shape[:-1]))
        sums = observer.claim(x.device) if host.training else None
        weights = Weights(*frozen, s_gate, s_up, s_down)
        return LoRAFFN.apply(x, a_gate, b_gate, a_up, b_up, a_down, b_down, weights, spec, sums, mask)

    return replace_forward(host, forward)


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
    """How to read the frozen weight under a LoRA layer, None where it is of a kind not known here."""
    base = getattr(layer, "base_layer", None)
    if type(layer) is peft_layer.Linear and type(base) is nn.Linear and not base.weight.requires_grad:
        return lambda dtype: base.weight.to(dtype)
    if type(layer).__name__ == "Linear4bit" and type(base).__name__ == "Linear4bit":
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
