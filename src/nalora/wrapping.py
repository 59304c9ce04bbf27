"""What is around a model: the wrappers that train it, and the processes they train it with."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn


def is_engine(model: nn.Module) -> bool:
    """Whether it is DeepSpeed's wrapper."""
    return type(model).__name__ == "DeepSpeedEngine"


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel, DeepSpeed and torch.compile, so that block names stay the same."""
    while (inner := _inner(model)) is not None:
        model = inner
    return model


def ranks_of(model: nn.Module) -> dist.ProcessGroup | None:
    """The processes that a wrapper averages gradients over; None: all of them, or there is no wrapper to ask."""
    inside: nn.Module | None = model
    while inside is not None:
        if isinstance(inside, nn.parallel.DistributedDataParallel):
            return inside.process_group
        if is_engine(inside):
            group: dist.ProcessGroup = inside.data_parallel_group  # type: ignore[assignment]
            return group
        inside = _inner(inside)
    return None


def _inner(model: nn.Module) -> nn.Module | None:
    if isinstance(model, nn.parallel.DistributedDataParallel) or is_engine(model):
        module: nn.Module = model.module  # type: ignore[assignment]
        return module
    compiled = getattr(model, "_orig_mod", None)
    return compiled if isinstance(compiled, nn.Module) else None
