"""DeepSpeed's ZeRO-1 and ZeRO-2, where each process steps its own range of all parameters in one flat tensor.

The gradients of that range are in DeepSpeed's own buffers between `backward` and its optimizer's step, which also clips
them. They are multiplied there; the parameters themselves are overwritten from a master copy after the step.
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
from nalora.errors import refuse_first

_WHERE = "attach(optimizer=…)"
_EXPECTED = "ZeRO-1 or ZeRO-2 on the device, apply_to='gradient', one backward pass per step"
_USE_ZERO = "set zero_optimization.stage to 1 or 2, or train with DDP or FSDP2"


def is_deepspeed(optimizer: Any) -> bool:
    """Return whether the optimizer is one of DeepSpeed's."""
    return type(optimizer).__module__.partition(".")[0] == "deepspeed"


def check_optimizer(optimizer: Any, config: NALoRAConfig) -> None:
    """Refuse a setup in which DeepSpeed would undo the control, or step where it cannot be hooked.

    Raises:
        NALoRAError: anything but ZeRO-1 or 2 without offload, in gradient space, one backward pass per step.
    """
    usable = type(optimizer).__name__ == "DeepSpeedZeroOptimizer"
    problems = (
        (not usable, type(optimizer).__name__, _USE_ZERO),
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
    refuse_first(_WHERE, _EXPECTED, problems)


def check_engine(model: nn.Module, optimizer: Any) -> None:
    """Refuse DeepSpeed's engine around a plain optimizer, whose gradients it clips before the control acts."""
    without_zero = is_engine(model) and not is_deepspeed(optimizer)
    refuse_first(_WHERE, _EXPECTED, [(without_zero, "DeepSpeed without ZeRO", _USE_ZERO)])


def trained_parameters(optimizer: Any) -> list[nn.Parameter]:
    """Return the model's parameters that DeepSpeed steps; its `param_groups` hold their flat master copies."""
    return [parameter for group in optimizer.bit16_groups for parameter in group]


def hook_steps(
    optimizer: Any, begin: Callable[[], None], end: Callable[[], None], skip: Callable[[], None]
) -> list[Callable[[], None]]:
    """Hook the steps of DeepSpeed's optimizer; the functions returned remove the hooks.

    Args:
        optimizer: the optimizer.
        begin: called before it clips and steps.
        end: called after a step.
        skip: called in place of `end` after an overflow.
    """

    def before(*_: Any, **__: Any) -> None:
        found = f"{optimizer.micro_step_id + 1} backward passes before one step of DeepSpeed's optimizer"
        fix = "step after every backward pass, or train with DDP or FSDP2"
        refuse_first(_WHERE, _EXPECTED, [(optimizer.micro_step_id > 0, found, fix)])
        begin()

    def after(*_: Any, **__: Any) -> None:
        (skip if optimizer.overflow else end)()

    return [wrap_method(optimizer, "step", before=before, after=after)]


@torch.no_grad()
def multiply_gradients(controls: list[Control]) -> None:
    """Compute ∇θ ← f ⊙ ∇θ for the range of every parameter that this process steps."""
    gradients: list[Tensor] = []
    factors: list[Tensor] = []
    for control in controls:
        for parameter, factor in zip(control.parameters, control.expanded(control.parameters), strict=True):
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
