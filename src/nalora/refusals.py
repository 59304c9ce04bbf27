"""What the controller refuses, so that training never looks fine while the method does nothing."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable
from typing import Any

import torch
from peft.tuners.lora.layer import LoraLayer
from torch import nn
from torch.optim import Optimizer

from nalora.controlled import parts
from nalora.errors import NALoRAError
from nalora.observer import GateObserver, is_observed
from nalora.plan import Plan


def if_kernels_are_unknown(kernels: str) -> None:
    """Refuse a misspelt choice, and fused layers where there is no Triton to write them in."""
    if kernels not in ("auto", "off", "fused", "fused-activation"):
        raise NALoRAError(
            "kernels",
            found=repr(kernels),
            expected="'auto', 'off', 'fused' or 'fused-activation'",
            fix="kernels='auto'",
        )
    if kernels.startswith("fused") and importlib.util.find_spec("triton") is None:
        raise NALoRAError("kernels", found="no Triton", expected="Triton for kernels='fused'", fix="pip install triton")


def if_kernels_cannot_run(plan: Plan) -> None:
    """Refuse fused layers for a model that is not on a GPU."""
    for each in plan.blocks:
        device, _ = each.block.statistics_kind
        if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            raise NALoRAError(
                each.block.name,
                found=f"a block on {device} with kernels='fused'",
                expected="a CUDA device for Triton's kernels",
                fix="move the model to the GPU first, or use kernels='auto'",
            )


def if_watched_or_sharded(plan: Plan) -> None:
    """Refuse layers that another controller watches or that are only a shard of themselves."""
    for each in plan.blocks:
        for projection in each.block.projections.values():
            if is_observed(projection.module):
                raise NALoRAError(
                    projection.name,
                    found="a layer that another controller watches already",
                    expected="one controller per model",
                    fix="call detach() on the first one",
                )
            if any(type(parameter.data).__name__ == "DTensor" for parameter in projection.module.parameters()):
                raise NALoRAError(
                    projection.name,
                    found="parameters sharded over devices (DTensor: tensor parallel or FSDP2)",
                    expected="whole parameters on each rank: a quantile over a shard is another method",
                    fix="train with DDP or on one device",
                )


def unless_torch_optimizer(optimizer: Any) -> Optimizer:
    """The torch optimizer inside Accelerate's wrapper, or a refusal."""
    origin = type(optimizer).__module__.partition(".")[0]
    if origin == "accelerate":
        return unless_torch_optimizer(optimizer.optimizer)
    if origin == "deepspeed" or not isinstance(optimizer, Optimizer):
        raise NALoRAError(
            "attach(optimizer=…)",
            found=f"{type(optimizer).__module__}.{type(optimizer).__name__}",
            expected="a torch.optim.Optimizer; DeepSpeed steps its own master copy of the parameters",
            fix="train with DDP, or without DeepSpeed",
        )
    if "schedulefree" in type(optimizer).__module__:
        raise NALoRAError(
            "attach(optimizer=…)",
            found=f"{type(optimizer).__name__}, which trains at one point and keeps another",
            expected="an optimizer whose step is all that moves a parameter",
            fix="use AdamW, SGD or Adafactor",
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise NALoRAError(
            "attach(optimizer=…)",
            found="LBFGS, which evaluates the loss several times in one step",
            expected="an optimizer with one gradient per step",
            fix="use AdamW, SGD or Adafactor",
        )
    return optimizer


def if_parameters_are_missing(model: nn.Module, plan: Plan, optimizer: Optimizer) -> None:
    """Refuse an optimizer that does not hold every controlled LoRA parameter."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for each in plan.blocks:
        for parameter, _ in parts(each):
            if parameter.requires_grad and id(parameter) not in held:
                raise NALoRAError(
                    names[id(parameter)],
                    found=f"a trainable LoRA parameter that {type(optimizer).__name__} does not hold",
                    expected="every controlled LoRA parameter in the optimizer given to attach",
                    fix="build the optimizer from the parameters of this model after adding the adapter, and do"
                    " not step parameters inside backward",
                )


def unless_gates_were_observed(observers: Iterable[GateObserver]) -> None:
    """The general rule: an adapter with a gradient whose gate saw no token was trained behind our back."""
    for observer in observers:
        if observer.gradient_arrived and observer.calls == 0:
            raise NALoRAError(
                observer.block.gate.name,
                found="a gradient for this block's adapters, although its gate saw no token",
                expected="forward passes through the gate layer in training mode after attach",
                fix="switch off fused LoRA-MLP kernels (Unsloth; Axolotl: lora_mlp_kernel: false), attach before"
                " the first compiled call (or torch.compiler.reset()), and train in model.train() mode",
            )


def if_layers_are_gone(model: nn.Module, plan: Plan) -> None:
    """Refuse a step after which merged, unloaded or replaced layers would explain why nothing was observed."""
    modules = dict(model.named_modules())
    for each in plan.blocks:
        for projection in each.block.projections.values():
            merged = isinstance(projection.module, LoraLayer) and projection.module.merged
            if merged or modules.get(projection.name) is not projection.module:
                raise NALoRAError(
                    projection.name,
                    found="merged adapters" if merged else "a layer that was unloaded or replaced since attach",
                    expected="the LoRA layers that the controller was attached to",
                    fix="unmerge before training on" if merged else "detach(), then attach again",
                )
