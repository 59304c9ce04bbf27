"""What `print` of fused layers says: what is fused, and what is left to PEFT and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from peft.tuners.lora.layer import LoraLayer
from torch import nn

from nalora.control.blocks import FFNBlock
from nalora.control.fusable import why_layer_by_layer, why_left_to_peft

if TYPE_CHECKING:
    from nalora.kernels.fused.fp8_base import FP8Base


def of_layers(model: nn.Module, blocks: Sequence[FFNBlock]) -> list[str]:
    """Return how many LoRA layers are fused, then each reason why others, or whole FFNs, are not."""
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    left = {layer: reason for layer in layers if (reason := why_left_to_peft(layer))}
    reasons = [why_layer_by_layer(block) for block in blocks]
    whole = [block for block, reason in zip(blocks, reasons, strict=True) if not reason]
    in_ffns = {projection.module for block in whole for projection in block.projections.values()}
    functions = f", {len(in_ffns)} of them in {len(whole)} FFNs that are one function each" if whole else ""
    lines = [f"Fused layers: {len(layers) - len(left)} of {len(layers)} LoRA layers{functions}"]
    lines += [f"  left to PEFT: {number} layers: {reason}" for reason, number in Counter(left.values()).items()]
    counts = Counter(reason for reason in reasons if reason)
    return lines + [f"  computed layer by layer: {number} FFNs: {reason}" for reason, number in counts.items()]


def reasons_if_nothing_is_fused(model: nn.Module) -> list[str]:
    """Return why every LoRA layer is left to PEFT; empty if any is fused."""
    reasons = [why_left_to_peft(module) for module in model.modules() if isinstance(module, LoraLayer)]
    return [*dict.fromkeys(reasons)] if all(reasons) else []


def of_base(base: FP8Base) -> list[str]:
    """Return which layers of a base are in FP8, and what that changes."""
    memory = f"{base.saved_bytes / 2**30:.2f} GiB less memory"
    kept = ", originals kept on the host" if base.can_restore else ""
    error = f"rounding changes the weights by {base.error:.1%} of their norm"
    lines = [f"  base in FP8: {len(base.converted)} linear layers, {memory}{kept}; {error}"]
    return lines + [f"  base not in FP8: {len(names)} layers: {reason}" for reason, names in base.left.items()]
