"""Train, measure and compare LoRA adapters; Nonlinearity-Aware LoRA for any training script that uses PEFT."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nalora import activations
    from nalora.config import NALoRAConfig, ProjectionScale
    from nalora.control.controller import NALoRAController, attach
    from nalora.control.fused_model import fuse
    from nalora.errors import NALoRAError
    from nalora.integrations.trainer import attach_trainer

__version__ = "0.2.0"
__all__ = [
    "NALoRAConfig",
    "NALoRAController",
    "NALoRAError",
    "ProjectionScale",
    "__version__",
    "activations",
    "attach",
    "attach_trainer",
    "fuse",
]


# Loaded on first use: torch and peft take five seconds, which `nalora --version` need not wait for.
_HOMES = {
    "NALoRAConfig": "config",
    "ProjectionScale": "config",
    "NALoRAController": "control.controller",
    "attach": "control.controller",
    "fuse": "control.fused_model",
    "NALoRAError": "errors",
    "attach_trainer": "integrations.trainer",
}


def __getattr__(name: str) -> Any:
    if name == "activations":
        return import_module("nalora.activations")
    if name in _HOMES:
        return getattr(import_module(f"nalora.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'nalora' has no attribute {name!r}")
