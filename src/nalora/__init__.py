"""Nonlinearity-Aware LoRA: train ordinary LoRA adapters with an eye on the FFN gates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nalora import activations
from nalora.config import NALoRAConfig, ProjectionScale
from nalora.controller import NALoRAController, attach
from nalora.errors import NALoRAError

if TYPE_CHECKING:
    from nalora.integrations.trainer import attach_trainer

__version__ = "0.1.0"
__all__ = [
    "NALoRAConfig",
    "NALoRAController",
    "NALoRAError",
    "ProjectionScale",
    "__version__",
    "activations",
    "attach",
    "attach_trainer",
]


def __getattr__(name: str) -> Any:
    # transformers is needed only by those who use its Trainer.
    if name == "attach_trainer":
        from nalora.integrations.trainer import attach_trainer

        return attach_trainer
    raise AttributeError(f"module 'nalora' has no attribute {name!r}")
