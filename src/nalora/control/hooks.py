"""Hooks on the methods of other objects and on optimizer steps, without subclassing, that copies do not inherit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


def wrap_method(
    owner: Any,
    method: str,
    *,
    before: Callable[..., None] | None = None,
    after: Callable[..., None] | None = None,
    result: Callable[[Any], None] | None = None,
) -> Callable[[], None]:
    """Call `before` and `after` with the arguments of every call of ``owner.method``, `result` with its return value.

    The function returned restores the method.
    """
    original = getattr(owner, method)
    was_own = method in vars(owner)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before(*args, **kwargs)
        returned = original(*args, **kwargs)
        if result is not None:
            result(returned)
        if after is not None:
            after(*args, **kwargs)
        return returned

    setattr(owner, method, wrapped)
    return functools.partial(setattr, owner, method, original) if was_own else functools.partial(delattr, owner, method)


def hook_steps(
    optimizer: Optimizer,
    begin: Callable[[], None],
    end: Callable[[Tensor | None], None],
    zeroed: Callable[..., None],
) -> list[Callable[[], None]]:
    """Hook the steps of any torch optimizer; the functions returned remove the hooks.

    Args:
        optimizer: the optimizer.
        begin: called when the gradients of a step are complete, before the optimizer uses them.
        end: called after a step with a boolean on the device, whether the step happened; None if it certainly did.
        zeroed: called after gradients were zeroed.
    """

    def before(
        optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is the optimizer
        if closure is None:
            begin()
            return None

        def closure_then_begin() -> Any:  # the closure computes the gradients inside the step
            with torch.enable_grad():
                loss = closure()
            begin()
            return loss

        return (args[:1], {**kwargs, "closure": closure_then_begin})

    def after(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Fused optimizers call their step on an fp16 overflow too, and skip it on the device.
        found_inf = getattr(optimizer, "found_inf", None)
        end(None if found_inf is None else found_inf == 0)

    return [
        optimizer.register_step_pre_hook(before).remove,
        optimizer.register_step_post_hook(after).remove,
        wrap_method(optimizer, "zero_grad", after=zeroed),
    ]
