"""Which layers and FFNs fused functions compute, and why they do not compute the others."""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lora.layer import LoraLayer
from torch import nn

from nalora.control.blocks import FFNBlock
from nalora.control.plan import Plan
from nalora.errors import NALoRAError
from nalora.kernels.fused.adapters import frozen_weight
from nalora.kernels.fused.compiled_layers import decoder_layers
from nalora.kernels.fused.foreign import code_in_ffn, code_inside, replaced_forward, replaced_host_forward
from nalora.kernels.statistics.engines import has_triton, triton_runs_on


def why_left_to_peft(layer: LoraLayer) -> str:
    """Return why training passes through PEFT's own forward of a LoRA layer; empty if it is fused."""
    active = [name for name in layer.active_adapters if name in layer.lora_A]
    if foreign := replaced_forward(layer) or code_inside(layer):
        return foreign
    if frozen_weight(layer) is None:
        trained = any(parameter.requires_grad for parameter in layer.base_layer.parameters())
        kind = f"{type(layer.base_layer).__name__} below {type(layer).__name__}"
        return "the base weight is trained" if trained else f"{kind} is not supported"
    if len(active) != 1 or layer.merged or layer.disable_adapters:
        return f"{len(active)} active adapters" if len(active) != 1 else "its adapter is merged or disabled"
    (name,) = active
    if name in layer.lora_variant:
        return f"{type(layer.lora_variant[name]).__name__.removesuffix('LinearVariant')} is not plain LoRA"
    if layer.lora_B[name].bias is not None:
        return "lora_bias"
    return "lora_dropout in training" if getattr(layer.lora_dropout[name], "p", 0) else ""


def why_not_one_function(block: FFNBlock) -> str:
    """Return why a block cannot be computed as one function, whatever its adapters are; empty if it can be."""
    if block.experts is not None:
        return "experts"
    if block.host is None or block.up is None or block.fused:
        return block.extra or "an FFN that is not a module with separate gate, up and down layers"
    if foreign := replaced_host_forward(block.host) or next(code_in_ffn(block.host), ""):
        return foreign
    from nalora.kernels.statistics.triton_activations import number_and_limit  # Triton may not be installed

    if number_and_limit(block.activation) is None:
        return f"{block.activation.name}, which has no kernel"
    for projection in block.projections.values():
        layer: Any = projection.module
        role = projection.name.rpartition(".")[2]
        if frozen_weight(layer) is None:
            reason = why_left_to_peft(layer) if isinstance(layer, LoraLayer) else "no adapter"
            return f"{role}: {reason}"
        if foreign := replaced_forward(layer) or code_inside(layer):
            return f"{role}: {foreign}"
        if layer.base_layer.bias is not None:
            return f"{role}: a bias"
    dtypes = {_dtype_of(projection.module) for projection in block.projections.values()}
    return f"projections in {' and '.join(sorted(map(str, dtypes)))}" if len(dtypes) > 1 else ""


def _dtype_of(layer: Any) -> torch.dtype:
    """Return the dtype that a layer's weight has outside of FP8."""
    dtype: torch.dtype = getattr(layer.base_layer, "original_dtype", None) or layer.base_layer.weight.dtype
    return dtype


def refuse_unless_observable(model: nn.Module, plan: Plan, *, graphed: bool = False) -> None:
    """Raise NALoRAError for a gate in a decoder layer whose statistics a compiled or `graphed` layer cannot collect.

    They are collected by the function of the whole FFN. A hook on the gate alone would be compiled for every layer, and
    a replay would not call it.
    """
    kind, option = ("replayed", "cuda_graphs") if graphed else ("compiled", "compile_layers")
    layers = decoder_layers(model)
    for planned in plan.blocks:
        block = planned.block
        if any(block.place.startswith(f"{name}.") for name in layers) and (reason := why_layer_by_layer(block)):
            raise NALoRAError(
                block.name,
                found=f"{reason}, in a {kind} layer",
                expected="an FFN that is one fused function, which observes its gate",
                fix=f"call undo(), then fuse(model) without {option}",
            )


def why_layer_by_layer(block: FFNBlock) -> str:
    """Return why training computes an FFN layer by layer, with its adapters as they are; empty if as one function."""
    if not has_triton():
        return "Triton is not installed"
    if reason := why_not_one_function(block):
        return reason
    layers: list[Any] = [projection.module for projection in block.projections.values()]
    for projection, layer in zip(block.projections.values(), layers, strict=True):
        if reason := why_left_to_peft(layer):
            return f"{projection.name.rpartition('.')[2]}: {reason}"
    if len(ranks := {layer.r[name] for layer in layers for name in layer.active_adapters if name in layer.r}) > 1:
        return f"adapters of ranks {', '.join(map(str, sorted(ranks)))}"
    device = next(layers[0].parameters()).device
    return "" if triton_runs_on(device) else f"a model on {device.type}, where Triton does not run"
