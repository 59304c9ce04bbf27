"""Checks of models, optimizers and settings for which training would run but NA-LoRA would not act, or act wrongly."""

from __future__ import annotations

import importlib.util
import typing
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from nalora.config import Kernels, NALoRAConfig
from nalora.control import deepspeed
from nalora.control.gate_taps import is_tapped
from nalora.control.observer import is_observed
from nalora.control.parameters import controlled_parameters
from nalora.control.peft_layers import all_adapters
from nalora.control.plan import Plan
from nalora.control.window import GateWindow
from nalora.distributed.shards import cuts_rows, is_data_parallel, is_offloaded, is_sharded
from nalora.errors import NALoRAError, missing_package, require
from nalora.kernels.statistics.engines import triton_runs_on


def check_arguments(model: Any, config: Any, kernels: str) -> None:
    """Refuse an argument of another type, an unknown kernel, and fused kernels without Triton."""
    if not isinstance(model, nn.Module):
        raise NALoRAError(
            "attach(model, optimizer)",
            found=f"{type(model).__name__} in place of the model",
            expected="a torch.nn.Module with PEFT LoRA layers",
            fix="pass the model first, then its optimizer",
        )
    if config is not None and not isinstance(config, NALoRAConfig):
        raise NALoRAError(
            "attach(config=…)",
            found=type(config).__name__,
            expected="a NALoRAConfig",
            fix="NALoRAConfig(apply_to='update'), or NALoRAConfig(**settings) for a dictionary",
        )
    known = typing.get_args(Kernels)
    require(kernels in known, "kernels", kernels, f"one of {', '.join(map(repr, known))}", "kernels='auto'")
    if kernels == "fused" and importlib.util.find_spec("triton") is None:
        raise missing_package("kernels", "triton", "for kernels='fused'", instead=", or kernels='auto'")


def check_plan(plan: Plan, kernels: str) -> None:
    """Refuse layers with another controller's hooks, and fused kernels for a model that is not on a GPU."""
    for block in (planned.block for planned in plan.blocks):
        tapped = block.experts is not None and is_tapped(block.experts.module)
        if tapped or any(is_observed(projection.module) for projection in block.projections.values()):
            raise NALoRAError(
                block.gate.name,
                found="a layer that another controller observes already",
                expected="one controller per model",
                fix="call detach() on the first one",
            )
    for planned in plan.blocks if kernels == "fused" else ():
        device, _ = planned.block.statistics_kind
        if not triton_runs_on(device):
            raise NALoRAError(
                planned.block.name,
                found=f"a block on {device} with kernels='fused'",
                expected="a CUDA device for Triton's kernels",
                fix="move the model to the GPU first, or use kernels='auto'",
            )


def check_not_flattened(model: nn.Module) -> None:
    """Refuse FSDP1, which shards one flat tensor of all parameters and so cuts through rows."""
    for name, module in model.named_modules():
        if type(module).__name__ == "FullyShardedDataParallel":
            raise NALoRAError(
                name or type(model).__name__,
                found="a module wrapped by FSDP1 (FullyShardedDataParallel), whose parameters are flattened",
                expected="parameters sharded by whole rows",
                fix="use FSDP2: torch.distributed.fsdp.fully_shard, or fsdp_version: 2 in Accelerate's configuration",
            )


def check_sharding(model: nn.Module, plan: Plan) -> None:
    """Refuse sharded parameters that no `fully_shard` of this model gathers on the device before a layer computes."""
    # Not by name: a checkpointing wrapper changes the names of layers.
    gathered = {p for module in model.modules() if isinstance(module, FSDPModule) for p in module.parameters()}
    for name, parameter in plan.named_parameters():
        if not is_sharded(parameter):
            continue
        if not (parameter in gathered and is_data_parallel(parameter)):
            raise NALoRAError(
                name,
                found=f"a parameter sharded for tensor parallelism ({type(parameter.data).__name__},"
                f" placed as {getattr(parameter, 'placements', ())})",
                expected="layers that compute all of their channels: a quantile over a shard is another method",
                fix="train with DDP or FSDP2 (fully_shard) alone, and pass the sharded model to attach",
            )
        if is_offloaded(parameter):
            raise NALoRAError(
                name,
                found="a parameter that FSDP2 offloads to the CPU (CPUOffloadPolicy)",
                expected="adapters on the device that computes the gates",
                fix="shard without CPU offload",
            )
    for block in (planned.block for planned in plan.blocks if planned.block.experts):
        adapters = (adapter for p in block.projections.values() for adapter in all_adapters(p.module))
        if any(cuts_rows(parameter) for adapter in adapters for parameter in (adapter.a, adapter.b)):
            raise NALoRAError(
                block.name,
                found="adapters of experts that are sharded by their second dimension",
                expected="shards of whole rows: the columns of B belong to different experts",
                fix="call fully_shard without a shard_placement_fn for them",
            )


def usable_optimizer(optimizer: Any) -> Any:
    """Return the torch or DeepSpeed optimizer inside Accelerate's wrapper; refuse what NA-LoRA cannot control."""
    if type(optimizer).__module__.partition(".")[0] == "accelerate":
        return usable_optimizer(optimizer.optimizer)
    if deepspeed.is_deepspeed(optimizer):
        return optimizer
    if not isinstance(optimizer, Optimizer):
        raise NALoRAError(
            "attach(optimizer=…)",
            found=f"{type(optimizer).__module__}.{type(optimizer).__name__}",
            expected="a torch.optim.Optimizer, or DeepSpeed's ZeRO-1 or 2",
            fix="pass the optimizer that steps the LoRA parameters",
        )
    if "schedulefree" in type(optimizer).__module__:
        raise NALoRAError(
            "attach(optimizer=…)",
            found=f"{type(optimizer).__name__}, which trains at one point and keeps another",
            expected="an optimizer that changes parameters only in its step",
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


def check_clipping(optimizer: Any) -> None:
    """Refuse to clip gradients that DeepSpeed clips in its own step, after NA-LoRA has multiplied them."""
    if deepspeed.is_deepspeed(optimizer):
        raise NALoRAError(
            "clip_grad_norm_",
            found="gradients that DeepSpeed stores and clips itself",
            expected="gradient_clipping in DeepSpeed's configuration; NA-LoRA acts before it",
            fix="remove clip_grad_norm_ from the loop",
        )


def check_parameters(model: nn.Module, plan: Plan, optimizer: Optimizer) -> None:
    """Refuse an optimizer without one of the controlled LoRA parameters."""
    if deepspeed.is_deepspeed(optimizer):
        optimized = set(map(id, deepspeed.trained_parameters(optimizer)))
    else:
        optimized = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for parameter in controlled_parameters(plan):
        if parameter.requires_grad and id(parameter) not in optimized:
            raise NALoRAError(
                next(name for name, other in model.named_parameters() if other is parameter),
                found=f"a trainable LoRA parameter that is not in {type(optimizer).__name__}",
                expected="every controlled LoRA parameter in the optimizer passed to attach",
                fix="build the optimizer from the parameters of this model after adding the adapter and after"
                " sharding it, and do not step parameters inside backward",
            )


def check_trainable(plan: Plan) -> None:
    """Refuse adapters that are all frozen, as PEFT loads them without is_trainable=True."""
    if plan.blocks and not any(parameter.requires_grad for parameter in controlled_parameters(plan)):
        raise NALoRAError(
            plan.blocks[0].block.gate.name,
            found="LoRA parameters that are all frozen",
            expected="trainable adapters",
            fix="PeftModel.from_pretrained(..., is_trainable=True), or requires_grad_(True) on them, then attach",
        )


def check_observed(gates: Iterable[GateWindow]) -> None:
    """Refuse a step in which an adapter has a gradient although its gate's outputs were never observed."""
    for gate in gates:
        if gate.gradient_arrived and gate.passes == 0:
            raise NALoRAError(
                gate.block.gate.name,
                found="a gradient for this block's adapters, although its gate saw no token",
                expected="forward passes through the gate layer in training mode after attach",
                fix="switch off fused LoRA-MLP kernels (Unsloth; Axolotl: lora_mlp_kernel: false), attach before"
                " the first compiled call (or torch.compiler.reset()), and train in model.train() mode",
            )


def check_layers(model: nn.Module, plan: Plan) -> None:
    """Refuse layers that were merged, unloaded or replaced, which explains why nothing was observed."""
    modules = set(model.modules())
    for projection in plan.projections:
        merged = projection.adapted and bool(projection.module.merged)
        if merged or projection.module not in modules:
            raise NALoRAError(
                projection.name,
                found="merged adapters" if merged else "a layer that was unloaded or replaced since attach",
                expected="the LoRA layers that the controller was attached to",
                fix="unmerge before training" if merged else "detach(), then attach again",
            )
