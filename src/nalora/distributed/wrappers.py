"""The wrappers around a model (DDP, DeepSpeed, torch.compile, PEFT) and the processes they train with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import nn


def is_engine(model: nn.Module) -> bool:
    """Return whether the model is DeepSpeed's engine."""
    return type(model).__name__ == "DeepSpeedEngine"


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside DistributedDataParallel, DeepSpeed and torch.compile, so that layer names do not vary."""
    *_, innermost = _from_outside(model)
    return innermost


def base_of(model: nn.Module) -> nn.Module:
    """Return the model inside PEFT's wrapper, which contains the adapters; any other model is returned as it is."""
    wrapped: Any = model
    return wrapped.get_base_model() if hasattr(wrapped, "get_base_model") else model


def ranks_of(model: nn.Module) -> dist.ProcessGroup | None:
    """Return the processes that a wrapper averages gradients over; None for all processes or without a wrapper."""
    for wrapper in _from_outside(model):
        if isinstance(wrapper, nn.parallel.DistributedDataParallel):
            return wrapper.process_group
        if is_engine(wrapper):
            group: dist.ProcessGroup = wrapper.data_parallel_group  # type: ignore[assignment]
            return group
    return None


def flattens_parameters(trainer: Any) -> bool:
    """Return whether a `transformers.Trainer` uses FSDP1, which shards flattened parameters at any element."""
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    return bool(trainer.is_fsdp_enabled) and getattr(plugin, "fsdp_version", 1) < 2


def _from_outside(model: Any) -> Iterator[nn.Module]:
    """Yield the model, then what each wrapper contains."""
    while isinstance(model, nn.Module):
        yield model
        is_wrapped = isinstance(model, nn.parallel.DistributedDataParallel) or is_engine(model)
        model = model.module if is_wrapped else getattr(model, "_orig_mod", None)
