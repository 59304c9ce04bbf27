"""DeepSpeed's ZeRO-1 and ZeRO-2: each process averages and steps its own stretch of all parameters laid end to end.

The gradients of that stretch wait in DeepSpeed's own buffers between `backward` and its optimizer's step, which also
clips them. There they are multiplied; the parameters themselves are overwritten from a master copy after the step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from nalora.config import NALoRAConfig
from nalora.control.apply import Control
from nalora.control.hooks import wrap_method
from nalora.distributed.wrappers import is_engine
from nalora.errors import NALoRAError


def is_deepspeed(optimizer: Any) -> bool:
    """Whether DeepSpeed made the optimizer."""
    return type(optimizer).__module__.partition(".")[0] == "deepspeed"


def refuse_unusable(optimizer: Any, config: NALoRAConfig) -> None:
    """Name what DeepSpeed would undo, or do where nobody can follow.

    Raises:
        NALoRAError: anything but ZeRO-1 or 2 without offload, in gradient space, one backward pass per step.
    """
    usable = type(optimizer).__name__ == "DeepSpeedZeroOptimizer"
    refusals = (
        (
            not usable,
            f"{type(optimizer).__name__}",
            "set zero_optimization.stage to 1 or 2, or train with DDP or FSDP2",
        ),
        (
            config.apply_to == "update",
            "apply_to='update' with DeepSpeed, which overwrites parameters from a master copy after every step",
            "use apply_to='gradient', or train with DDP or FSDP2",
        ),
        (
            usable and optimizer.cpu_offload,
            "DeepSpeed with offload_optimizer, whose gradients leave the device during backward",
            "set offload_optimizer.device to none",
        ),
        (
            usable and optimizer.gradient_accumulation_steps > 1,
            "DeepSpeed with gradient_accumulation_steps > 1",
            "set gradient_accumulation_steps to 1, or train with DDP or FSDP2",
        ),
    )
    for applies, found, fix in refusals:
        if applies:
            raise _refused(found, fix)


def refuse_engine_without_zero(model: nn.Module, optimizer: Any) -> None:
    """Refuse DeepSpeed's engine around a plain optimizer, whose gradients it clips before the control."""
    if is_engine(model) and not is_deepspeed(optimizer):
        raise _refused("DeepSpeed without ZeRO", "set zero_optimization.stage to 1 or 2, or train with DDP or FSDP2")


def trained_parameters(optimizer: Any) -> list[nn.Parameter]:
    """The model's parameters that DeepSpeed steps; its `param_groups` hold their flat master copies."""
    return [parameter for group in optimizer.bit16_groups for parameter in group]


def follow_steps(
    optimizer: Any, begin: Callable[[], None], end: Callable[[], None], skip: Callable[[], None]
) -> list[Callable[[], None]]:
    """Act around DeepSpeed's steps, wherever the engine takes them; what undoes it.

    Args:
        optimizer: DeepSpeed's own.
        begin: called before it clips and steps.
        end: called after a step.
        skip: called instead where it found an overflow.
    """

    def before(*_: Any, **__: Any) -> None:
        if optimizer.micro_step_id > 0:
            raise _refused(
                f"{optimizer.micro_step_id + 1} backward passes before one step of DeepSpeed's optimizer",
                "step after every backward pass, or train with DDP or FSDP2",
            )
        begin()

    def after(*_: Any, **__: Any) -> None:
        (skip if optimizer.overflow else end)()

    return [wrap_method(optimizer, "step", before=before, after=after)]


@torch.no_grad()
def multiply_gradients(controls: list[Control]) -> None:
    """∇θ ← f ⊙ ∇θ for the stretch of every parameter that this process steps."""
    gradients: list[Tensor] = []
    factors: list[Tensor] = []
    for control in controls:
        for parameter, factor in zip(control.parameters, control.spelt_out(control.parameters), strict=True):
            mapping: Any = getattr(parameter, "_hp_mapping", None)
            if mapping is None:
                continue  # another process steps it
            gradient = mapping.get_lp_grad_fragment(parameter._index_in_param_group)  # type: ignore[attr-defined]
            if gradient is not None:
                start, length = mapping.lp_fragment_address.start, mapping.lp_fragment_address.numel
                gradients.append(gradient.view(-1))
                factors.append(factor.reshape(-1)[start : start + length].to(gradient.dtype))
    if gradients:
        torch._foreach_mul_(gradients, factors)


def _refused(found: str, fix: str) -> NALoRAError:
    return NALoRAError(
        "attach(optimizer=…)",
        found=found,
        expected="ZeRO-1 or ZeRO-2 on the device, apply_to='gradient', one backward pass per step",
        fix=fix,
    )
