"""What the controller refuses, so that training never looks fine while the method does nothing."""

from __future__ import annotations

import importlib.util
import os
import typing
from collections.abc import Iterable
from typing import Any

import torch
from peft.tuners.lora.layer import LoraLayer
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from nalora.config import Kernels, NALoRAConfig
from nalora.control import deepspeed
from nalora.control.observer import is_observed
from nalora.control.parameters import parts
from nalora.control.plan import Plan
from nalora.control.window import GateWindow
from nalora.distributed.shards import is_data_parallel, is_offloaded, is_sharded
from nalora.errors import NALoRAError, missing_package, wrong_value


def if_arguments_are_mixed_up(model: Any, config: Any) -> None:
    """Refuse what is no model, and settings that are no `NALoRAConfig`."""
    if not isinstance(model, nn.Module):
        raise NALoRAError(
            "attach(model, optimizer)",
            found=f"{type(model).__name__} where the model belongs",
            expected="a torch.nn.Module with PEFT LoRA layers",
            fix="hand over the model first, then its optimizer",
        )
    if config is not None and not isinstance(config, NALoRAConfig):
        raise NALoRAError(
            "attach(config=…)",
            found=type(config).__name__,
            expected="a NALoRAConfig",
            fix="NALoRAConfig(apply_to='update'), or NALoRAConfig(**settings) for a dictionary",
        )


def if_kernels_are_unknown(kernels: str) -> None:
    """Refuse a misspelt choice, and fused layers where there is no Triton to write them in."""
    if kernels not in (known := typing.get_args(Kernels)):
        expected = f"one of {', '.join(map(repr, known))}"
        raise wrong_value("kernels", kernels, expected, "kernels='auto'")
    if kernels == "fused" and importlib.util.find_spec("triton") is None:
        raise missing_package("kernels", "triton", "for kernels='fused'", instead=", or kernels='auto'")


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


def if_watched(plan: Plan) -> None:
    """Refuse layers that another controller watches."""
    for each in plan.blocks:
        for projection in each.block.projections.values():
            if is_observed(projection.module):
                raise NALoRAError(
                    projection.name,
                    found="a layer that another controller watches already",
                    expected="one controller per model",
                    fix="call detach() on the first one",
                )


def if_flattened(model: nn.Module) -> None:
    """Refuse FSDP1, which keeps its parameters as slices of one flat tensor, whatever rows they cut through."""
    for name, module in model.named_modules():
        if type(module).__name__ == "FullyShardedDataParallel":
            raise NALoRAError(
                name or type(model).__name__,
                found="a module wrapped by FSDP1 (FullyShardedDataParallel), whose parameters are flattened",
                expected="parameters sharded by whole rows",
                fix="use FSDP2: torch.distributed.fsdp.fully_shard, or fsdp_version: 2 in Accelerate's configuration",
            )


def if_tensor_parallel(model: nn.Module, plan: Plan) -> None:
    """Refuse sharded parameters that no `fully_shard` of this model gathers before a layer computes."""
    # Not by name: a checkpointing wrapper gives layers other names.
    gathered = {p for module in model.modules() if isinstance(module, FSDPModule) for p in module.parameters()}
    for each in plan.blocks:
        for projection in each.block.projections.values():
            for name, parameter in projection.module.named_parameters():
                if not is_sharded(parameter):
                    continue
                where = f"{projection.name}.{name}"
                if not (parameter in gathered and is_data_parallel(parameter)):
                    raise NALoRAError(
                        where,
                        found=f"a parameter sharded for tensor parallelism ({type(parameter.data).__name__},"
                        f" placed as {getattr(parameter, 'placements', ())})",
                        expected="layers that compute all of their channels: a quantile over a shard is another method",
                        fix="train with DDP or FSDP2 (fully_shard) alone, and hand attach the model that was sharded",
                    )
                if is_offloaded(parameter):
                    raise NALoRAError(
                        where,
                        found="a parameter that FSDP2 offloads to the host (CPUOffloadPolicy)",
                        expected="adapters on the device that computes the gates",
                        fix="shard without CPU offload",
                    )


def unless_known_optimizer(optimizer: Any) -> Any:
    """The torch or DeepSpeed optimizer inside Accelerate's wrapper, or a refusal."""
    if type(optimizer).__module__.partition(".")[0] == "accelerate":
        return unless_known_optimizer(optimizer.optimizer)
    if deepspeed.is_deepspeed(optimizer):
        return optimizer
    if not isinstance(optimizer, Optimizer):
        raise NALoRAError(
            "attach(optimizer=…)",
            found=f"{type(optimizer).__module__}.{type(optimizer).__name__}",
            expected="a torch.optim.Optimizer, or DeepSpeed's ZeRO-1 or 2",
            fix="hand over the optimizer that steps the LoRA parameters",
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


def if_clipped_elsewhere(optimizer: Any) -> None:
    """Refuse to clip what DeepSpeed clips in its own step, after the control."""
    if deepspeed.is_deepspeed(optimizer):
        raise NALoRAError(
            "clip_grad_norm_",
            found="gradients that DeepSpeed keeps and clips itself",
            expected="gradient_clipping in DeepSpeed's configuration; the control acts before it",
            fix="leave clip_grad_norm_ out of the loop",
        )


def if_parameters_are_missing(model: nn.Module, plan: Plan, optimizer: Optimizer) -> None:
    """Refuse an optimizer that does not hold every controlled LoRA parameter."""
    if deepspeed.is_deepspeed(optimizer):
        held = {id(parameter) for parameter in deepspeed.trained_parameters(optimizer)}
    else:
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for each in plan.blocks:
        for parameter, _ in parts(each):
            if parameter.requires_grad and id(parameter) not in held:
                raise NALoRAError(
                    names[id(parameter)],
                    found=f"a trainable LoRA parameter that {type(optimizer).__name__} does not hold",
                    expected="every controlled LoRA parameter in the optimizer given to attach",
                    fix="build the optimizer from the parameters of this model after adding the adapter and after"
                    " sharding it, and do not step parameters inside backward",
                )


def if_nothing_learns(plan: Plan) -> None:
    """Refuse adapters that are all frozen, as PEFT loads them where it is not told that they are to be trained."""
    if plan.blocks and not any(parameter.requires_grad for each in plan.blocks for parameter, _ in parts(each)):
        raise NALoRAError(
            plan.blocks[0].block.gate.name,
            found="LoRA parameters that are all frozen",
            expected="adapters that learn",
            fix="PeftModel.from_pretrained(..., is_trainable=True), or requires_grad_(True) on them, then attach",
        )


def unless_gates_were_observed(windows: Iterable[GateWindow]) -> None:
    """The general rule: an adapter with a gradient whose gate saw no token was trained behind our back."""
    for window in windows:
        if window.gradient_arrived and window.passes == 0:
            raise NALoRAError(
                window.block.gate.name,
                found="a gradient for this block's adapters, although its gate saw no token",
                expected="forward passes through the gate layer in training mode after attach",
                fix="switch off fused LoRA-MLP kernels (Unsloth; Axolotl: lora_mlp_kernel: false), attach before"
                " the first compiled call (or torch.compiler.reset()), and train in model.train() mode",
            )


def if_layers_are_gone(model: nn.Module, plan: Plan) -> None:
    """Refuse a step after which merged, unloaded or replaced layers would explain why nothing was observed."""
    modules = set(model.modules())
    for each in plan.blocks:
        for projection in each.block.projections.values():
            merged = isinstance(projection.module, LoraLayer) and projection.module.merged
            if merged or projection.module not in modules:
                raise NALoRAError(
                    projection.name,
                    found="merged adapters" if merged else "a layer that was unloaded or replaced since attach",
                    expected="the LoRA layers that the controller was attached to",
                    fix="unmerge before training on" if merged else "detach(), then attach again",
                )
