"""Put fused linear layers in the place of PEFT's for the length of a training run, and take them out again.

A fused layer stands in only while it computes the same thing: one plain LoRA adapter without dropout, not merged, not
disabled, with gradients on, not under torch.compile. In every other call the module's own forward runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from nalora.kernels.fused.factors import StepFactors
from nalora.kernels.fused.peft_layers import frozen_weight, replace_forward
from nalora.kernels.fused.shared_input import LinearGroup, children_of_one_input


def fuse_adapters(
    model: nn.Module, factors: StepFactors | None = None, but: frozenset[nn.Module] = frozenset()
) -> list[Callable[[], None]]:
    """Fuse every LoRA linear layer of a model; what undoes it.

    Args:
        model: with adapters of PEFT's.
        factors: where they are cast, if others are cast there too.
        but: layers that are left as they are.
    """
    from peft.tuners.lora.layer import LoraLayer

    factors = factors or StepFactors()
    undo: list[Callable[[], None]] = []
    for parent in model.modules():
        children = parent.named_children()
        layers = {name: each for name, each in children if isinstance(each, LoraLayer) and each not in but}
        undo += fuse_linears(parent, layers, factors)
    return undo + factors.follow(model)


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
        output = group.compute(layer, x) if is_plain_call(args, kwargs) else None
        return original(x, *args, **kwargs) if output is None else output

    return forward


def is_plain_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a module was called as training calls it: with its input alone, for gradients, not to be compiled."""
    return not args and not kwargs and torch.is_grad_enabled() and not torch.compiler.is_compiling()
