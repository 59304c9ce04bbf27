"""PEFT adapters in folders: what their configuration says, and a base model with one of them."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any

from torch import nn

from nalora.errors import NALoRAError
from nalora.models.peft_names import ADAPTER
from nalora.models.target_modules import first_sentence

CONFIG_FILE = "adapter_config.json"
# Initialisations that leave the base's weights as they are; all others (PiSSA, OLoRA, …) subtract from them.
_KEEP_BASE = ("gaussian", "eva", "orthogonal")
# Parts of PEFT's and torch's messages about an adapter that was trained on another model.
_OF_ANOTHER_MODEL = ("size mismatch", "not found in the base model", "other layers", "No modules were targeted")


def is_adapter(folder: Path) -> bool:
    """Return whether the folder has a PEFT adapter; otherwise it may have a model."""
    return (folder / CONFIG_FILE).is_file()


def adapter_config(folder: Path) -> dict[str, Any]:
    """Return the configuration of a folder's adapter.

    Raises:
        NALoRAError: the file is damaged, is no adapter's, or would make PEFT import a Python module that it names.
    """
    file = folder / CONFIG_FILE
    config: Any = None
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        found = f"no JSON ({first_sentence(error)})"
    else:
        found = "" if isinstance(config, dict) and "peft_type" in config else "no peft_type"
    if found:
        raise NALoRAError(str(file), found=found, expected="the config of a PEFT adapter", fix="save the adapter again")
    if config.get("megatron_config"):
        raise NALoRAError(
            str(file),
            found=f"megatron_config, for which PEFT would import the Python module {config.get('megatron_core')!r}",
            expected="an adapter of a transformers model",
            fix="remove megatron_config from the file",
        )
    return dict(config)


def changes_base(config: dict[str, Any]) -> bool:
    """Return whether the adapter's initialisation changes the weights of the base model that PEFT loads it on."""
    start = config.get("init_lora_weights")
    return isinstance(start, str) and start.lower() not in _KEEP_BASE


def with_adapter(base: nn.Module, folder: Path, *, keep_base: bool = False) -> nn.Module:
    """Return the base model with a folder's adapter, in evaluation mode.

    PEFT changes the model that it wraps. With `keep_base` it wraps a copy instead, which shares the base's weights
    unless the adapter's initialisation would change them.

    Raises:
        NALoRAError: the adapter is damaged, incomplete, or of another model.
    """
    import peft

    config = adapter_config(folder)
    if keep_base:
        tensors = () if changes_base(config) else (*base.parameters(), *base.buffers())
        base = copy.deepcopy(base, {id(tensor): tensor for tensor in tensors})
    try:
        with warnings.catch_warnings(record=True) as raised:
            warnings.simplefilter("always")
            wrapped: Any = peft.PeftModel.from_pretrained(base, str(folder)).eval()
        # from_pretrained only warns about missing weights, and ignores others.
        missing = [str(warning.message) for warning in raised if "missing adapter keys" in str(warning.message)]
        if missing or (unexpected := wrapped.load_adapter(str(folder), ADAPTER).unexpected_keys):
            raise ValueError(f"other layers: {missing[0] if missing else unexpected[0]}")
    except Exception as error:  # PEFT, safetensors and torch each raise their own types for a damaged file
        raise _not_loaded(folder, config, error) from error
    model: nn.Module = wrapped
    return model


def _not_loaded(folder: Path, config: dict[str, Any], error: Exception) -> NALoRAError:
    reason = first_sentence(error)
    if any(part in str(error) for part in _OF_ANOTHER_MODEL):
        found, fix = f"an adapter of another model ({reason})", "give the base model that it was trained on"
    else:
        found, fix = f"an adapter that PEFT cannot load ({reason})", "save the adapter again, or train it again"
    name = config.get("base_model_name_or_path")
    expected = "a whole adapter of this base model" + (f" (its config names {name})" if name else "")
    return NALoRAError(str(folder), found=found, expected=expected, fix=fix)
