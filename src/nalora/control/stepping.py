"""Act around the steps of a torch optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from nalora.control.hooks import wrap_method


def follow_steps(
    optimizer: Optimizer,
    begin: Callable[[], None],
    end: Callable[[Tensor | None], None],
    zeroed: Callable[..., None],
) -> list[Callable[[], None]]:
    """Follow an optimizer's steps; what undoes it.

    Args:
        optimizer: any torch optimizer.
        begin: called when the gradients of a step are there and before they are used.
        end: called after a step, with whether it happened: a boolean on the device, None where it surely did.
        zeroed: called when gradients were zeroed.
    """

    def before(
        optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        # torch hands the hook the optimizer itself as args[0].
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            begin()
            return None

        # The closure computes the gradients inside the step: the control follows it there.
        def then_begin() -> Any:
            with torch.enable_grad():
                loss = closure()
            begin()
            return loss

        return (args[:1], {**kwargs, "closure": then_begin})

    def after(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Fused optimizers run their step on an fp16 overflow too and skip it on the device.
        found_inf = getattr(optimizer, "found_inf", None)
        end(None if found_inf is None else found_inf == 0)

    return [
        optimizer.register_step_pre_hook(before).remove,
        optimizer.register_step_post_hook(after).remove,
        wrap_method(optimizer, "zero_grad", after=zeroed),
    ]
