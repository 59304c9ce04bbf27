"""The wrappers around a model (DDP, DeepSpeed, torch.compile, PEFT) and the processes they train with."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn


def is_engine(model: nn.Module) -> bool:
    """Return whether the model is DeepSpeed's engine."""
    return type(model).__name__ == "DeepSpeedEngine"


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside DistributedDataParallel, DeepSpeed and torch.compile, so that layer names do not vary."""
    while (inner := _inner(model)) is not None:
        model = inner
    return model


def base_of(model: nn.Module) -> nn.Module:
    """Return the model inside PEFT's wrapper, which contains the adapters; any other model is returned as it is."""
    wrapped: Any = model
    return wrapped.get_base_model() if hasattr(wrapped, "get_base_model") else model


def ranks_of(model: nn.Module) -> dist.ProcessGroup | None:
    """Return the processes that a wrapper averages gradients over; None for all processes or without a wrapper."""
    inside: Any = model
    while inside is not None:
        if isinstance(inside, nn.parallel.DistributedDataParallel):
            return inside.process_group
        if is_engine(inside):
            group: dist.ProcessGroup = inside.data_parallel_group
            return group
        inside = _inner(inside)
    return None


def flattens_parameters(trainer: Any) -> bool:
    """Return whether a `transformers.Trainer` uses FSDP1, which shards flattened parameters at any element."""
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    return bool(trainer.is_fsdp_enabled) and getattr(plugin, "fsdp_version", 1) < 2


def _inner(model: Any) -> nn.Module | None:
    if isinstance(model, nn.parallel.DistributedDataParallel) or is_engine(model):
        module: nn.Module = model.module
        return module
    compiled = getattr(model, "_orig_mod", None)
    return compiled if isinstance(compiled, nn.Module) else None
