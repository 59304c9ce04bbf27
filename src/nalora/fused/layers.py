"""Put fused layers in the place of PEFT's for the length of a training run, and take them out again.

A fused layer stands in only while it computes the same thing: one plain LoRA adapter without dropout, not merged, not
disabled, with gradients on, not under torch.compile. In every other call the module's own forward runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from nalora.blocks import FFNBlock
from nalora.fused.factors import StepFactors, adapters_of
from nalora.fused.gated import GateSpec
from nalora.fused.gated_product import GatedProduct
from nalora.fused.lora_ffn import LoRAFFN, Weights
from nalora.fused.lora_linear import compute_dtype
from nalora.fused.peft_layers import frozen_weight, replace_forward
from nalora.fused.shared_input import LinearGroup, children_of_one_input
from nalora.observer import GateObserver
from nalora.statistics.triton_activations import number_and_limit
from nalora.statistics.triton_sums import as_bytes


def fuse_linears(parent: nn.Module, layers: dict[str, nn.Module], factors: StepFactors) -> list[Callable[[], None]]:
    """Compute a module's LoRA linear layers as single functions, those of one input as one; what undoes it.

    Args:
        parent: the module that calls the layers.
        layers: those of its children, by name, that may be fused.
        factors: where the adapters are cast.
    """
    weights = {name: weight for name, layer in layers.items() if (weight := frozen_weight(layer)) is not None}
    alike = [[name for name in names if name in weights] for names in children_of_one_input(parent)] if weights else []
    together = {name for names in alike for name in names}
    undo = []
    for names in (*alike, *([name] for name in weights if name not in together)):
        group = LinearGroup({layers[name]: weights[name] for name in names}, factors)
        undo += [replace_forward(layers[name], _fused_linear(layers[name], group)) for name in names]
    return undo


def _fused_linear(layer: nn.Module, group: LinearGroup) -> Callable[..., Tensor]:
    original = layer.forward

    @functools.wraps(original)
    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        output = group.compute(layer, x) if _is_plain_call(args, kwargs) else None
        return original(x, *args, **kwargs) if output is None else output

    return forward


def fuse_ffn(
    host: nn.Module, block: FFNBlock, observer: GateObserver, factors: StepFactors
) -> Callable[[], None] | None:
    """Compute a whole gated FFN as one function; the result puts the module's own forward back. None: impossible."""
    spec = _gate_spec(block, observer)
    if spec is None or block.up is None:
        return None
    inner, outer = (block.gate.module, block.up.module), (block.down.module,)
    frozen = [frozen_weight(layer) for layer in (*inner, *outer)]
    if None in frozen or any(layer.base_layer.bias is not None for layer in (*inner, *outer)):
        return None
    factors.groups += [inner, outer]
    original = host.forward

    @functools.wraps(original)
    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        inside, outside = adapters_of(inner), adapters_of(outer)
        if inside is None or outside is None or not _is_plain_call(args, kwargs):
            return original(x, *args, **kwargs)
        (a_gate, a_up), (b_gate, b_up), (a_down,), (b_down,) = *inside[:2], *outside[:2]
        if not a_gate.shape[0] == a_up.shape[0] == a_down.shape[0]:
            return original(x, *args, **kwargs)
        mask = as_bytes(observer.token_mask.of(x.shape[:-1]))
        sums = observer.claim(x.device) if host.training else None
        dtype = compute_dtype(x)
        made = factors.of(inner, inside, dtype), factors.of(outer, outside, dtype)
        weights = Weights(*frozen, *inside.scalings, *outside.scalings, *made)
        return LoRAFFN.apply(x, a_gate, b_gate, a_up, b_up, a_down, b_down, weights, spec, sums, mask)

    return replace_forward(host, forward)


def fuse_product(host: nn.Module, block: FFNBlock, observer: GateObserver) -> Callable[[], None] | None:
    """Compute the FFN's product φ(z) ⊙ u as one function, between PEFT's own linear layers; else as `fuse_ffn`."""
    spec = _gate_spec(block, observer)
    if spec is None or block.up is None:
        return None
    gate, up, down = block.gate.module, block.up.module, block.down.module
    original = host.forward

    @functools.wraps(original)
    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not _is_plain_call(args, kwargs):
            return original(x, *args, **kwargs)
        with observer.blindfolded():
            z, u = gate(x), up(x)
        mask = as_bytes(observer.token_mask.of(z.shape[:-1]))
        sums = observer.claim(z.device) if host.training and observer.is_adapted_pass() else None
        return down(GatedProduct.apply(z, u, spec, sums, mask))

    return replace_forward(host, forward)


def _gate_spec(block: FFNBlock, observer: GateObserver) -> GateSpec | None:
    """What the kernels must know of the block, None where it is not a gated FFN of an activation they know."""
    known = number_and_limit(block.activation)
    if known is None or block.up is None or block.fused:
        return None
    return GateSpec(*known, *observer.thresholds, block.up_offset, observer.with_up)


def _is_plain_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return not args and not kwargs and torch.is_grad_enabled() and not torch.compiler.is_compiling()
