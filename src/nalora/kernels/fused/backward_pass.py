"""How backward passes of fused functions run: once, and outside of autocast, which may be on around `backward()`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable


def backward_pass(function: Callable[..., Any]) -> Any:
    """Decorate a `backward` whose dtypes are those of its forward pass; a second derivative is refused."""

    @functools.wraps(function)
    def outside_of_autocast(ctx: Any, *grads: Any) -> Any:
        device = next((grad.device.type for grad in grads if grad is not None), None)
        if device is None or not torch.is_autocast_enabled(device):
            return function(ctx, *grads)
        with torch.autocast(device, enabled=False):
            return function(ctx, *grads)

    return once_differentiable(outside_of_autocast)
