"""Checkpoints as models: two adapters of one base share its weights, and a model takes another checkpoint's place."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from nalora.errors import NALoRAError

ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
_ADAPTER = "default"


def is_adapter(folder: Path) -> bool:
    """Whether the folder holds a PEFT adapter; else it holds a model."""
    return (folder / ADAPTER_CONFIG).is_file()


def adapt(base: nn.Module, folder: Path) -> nn.Module:
    """`base` with the adapter of a folder, which is changed by it.

    Raises:
        NALoRAError: a damaged adapter, or one of another model.
    """
    import peft

    try:
        wrapped: nn.Module = peft.PeftModel.from_pretrained(base, str(folder)).eval()
    except (OSError, ValueError, RuntimeError, TypeError, KeyError, SafetensorError) as error:
        raise _unusable(folder, error) from error
    return wrapped


def twin(model: nn.Module) -> nn.Module:
    """A second model on the same base weights, with adapters of its own: two adapters cost one base in memory."""
    shared = {
        id(parameter): parameter
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if _ADAPTER not in name.split(".")
    }
    return copy.deepcopy(model, shared)


def take_adapter(model: nn.Module, folder: Path) -> None:
    """Put the adapter of a folder in the place of the one that `model` has.

    Raises:
        NALoRAError: a damaged adapter, or one of another shape.
    """
    import peft

    try:
        tensors = load_file(folder / ADAPTER_WEIGHTS)
        outcome = peft.set_peft_model_state_dict(model, tensors, _ADAPTER)
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise _unusable(folder, error) from error
    missing = [name for name in outcome.missing_keys if _ADAPTER in name.split(".")]
    if missing or outcome.unexpected_keys:
        raise _unusable(folder, ValueError(f"other layers: {(missing + list(outcome.unexpected_keys))[0]}"))


def _unusable(folder: Path, error: Exception) -> NALoRAError:
    lines: list[Any] = [line for line in str(error).splitlines() if line.strip()]
    return NALoRAError(
        str(folder),
        found=f"an adapter that cannot be read ({lines[0].strip() if lines else type(error).__name__})",
        expected="a whole adapter of this run's base model",
        fix="remove that folder, or compare checkpoints of one run",
    )
