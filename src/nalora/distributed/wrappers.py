"""What is around a model: the wrappers that train it, and the processes they train it with."""

from __future__ import annotations

from typing import Any

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


def base_of(model: nn.Module) -> nn.Module:
    """The model that PEFT wrapped, with the adapters in it; a model that nobody wrapped is its own."""
    wrapped: Any = model
    return wrapped.get_base_model() if hasattr(wrapped, "get_base_model") else model


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


def flattens_parameters(trainer: Any) -> bool:
    """Whether a `transformers.Trainer` runs FSDP's first version, which cuts parameters anywhere."""
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    return bool(trainer.is_fsdp_enabled) and getattr(plugin, "fsdp_version", 1) < 2


def _inner(model: nn.Module) -> nn.Module | None:
    if isinstance(model, nn.parallel.DistributedDataParallel) or is_engine(model):
        module: nn.Module = model.module  # type: ignore[assignment]
        return module
    compiled = getattr(model, "_orig_mod", None)
    return compiled if isinstance(compiled, nn.Module) else None
