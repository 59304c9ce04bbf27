"""Put fused FFNs in the place of the model's for the length of a training run, and take them out again.

A fused FFN stands in only while it computes the same thing, as `fused.linears` says of layers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from nalora.control.blocks import FFNBlock
from nalora.control.observer import GateObserver
from nalora.kernels.fused.factors import StepFactors, adapters_of
from nalora.kernels.fused.gated import GateSpec
from nalora.kernels.fused.linears import is_plain_call
from nalora.kernels.fused.lora_ffn import LoRAFFN, Weights
from nalora.kernels.fused.lora_linear import compute_dtype
from nalora.kernels.fused.peft_layers import frozen_weight, replace_forward
from nalora.kernels.statistics.triton_activations import number_and_limit
from nalora.kernels.statistics.triton_sums import as_bytes


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
        if inside is None or outside is None or not is_plain_call(args, kwargs):
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


def _gate_spec(block: FFNBlock, observer: GateObserver) -> GateSpec | None:
    """What the kernels must know of the block, None where it is not a gated FFN of an activation they know."""
    known = number_and_limit(block.activation)
    if known is None or block.up is None or block.fused:
        return None
    return GateSpec(*known, *observer.thresholds, block.up_offset, observer.with_up)
