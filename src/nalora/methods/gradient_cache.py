"""Cache of reduced gradients, found again by a hash of weights, batches and settings."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from nalora.distributed import processes
from nalora.files import atomic
from nalora.methods.lora import lora_layers
from nalora.methods.method import Batch

# The kept tensors of each layer: by the layer's name, then by what they are.
Reduced = dict[str, dict[str, Tensor]]

_log = logging.getLogger("nalora")
# Version of the file format and of how gradients are computed; files of other versions are not found. In version 1 a
# batch was one pass, not one optimizer step.
_VERSION = 2
# Fields of a model's configuration that no gradient depends on.
_NAMES_ONLY = ("_name_or_path", "name_or_path", "transformers_version", "use_cache")


def file_name(model: nn.Module, batches: Iterable[Batch], device: torch.device, settings: Mapping[str, Any]) -> str:
    """Return a name that depends on weights, configuration, all processes' batches, settings and layers."""
    config: Any = getattr(model, "config", None)
    fields: dict[str, Any] = config.to_dict() if hasattr(config, "to_dict") else {}
    inputs = {
        "version": _VERSION,
        "settings": dict(settings),
        "model": {name: value for name, value in fields.items() if name not in _NAMES_ONLY},
        "layers": [name for name, _ in lora_layers(model)],
    }
    content = hashlib.blake2b(json.dumps(inputs, sort_keys=True, default=str).encode(), digest_size=24)
    # The scales of a quantised layer are in its state, not in its parameters; the adapters are switched off.
    state = dict(model.named_buffers()) | model.state_dict()
    _update(content, {name: tensor for name, tensor in state.items() if ".lora_" not in name})
    own = hashlib.blake2b(digest_size=32)
    for number, batch in enumerate(batches):
        _update(own, {f"{number} {name}": tensor for name, tensor in batch.items()})
    digests = torch.zeros(processes.count(), 4, dtype=torch.long, device=device)
    digests[processes.rank()] = torch.frombuffer(bytearray(own.digest()), dtype=torch.long).to(device)
    content.update(processes.sum_over_processes(digests).cpu().numpy().tobytes())
    return f"{content.hexdigest()}.safetensors"


def read(file: Path, layers: set[str], device: torch.device) -> Reduced | None:
    """Return the cached tensors of these layers, or None unless every process can read them."""
    reduced = _read(file)
    usable = reduced is not None and set(reduced) == layers
    agreed = processes.sum_over_processes(torch.tensor(int(usable), device=device))
    return reduced if usable and int(agreed) == processes.count() else None


def write(file: Path, reduced: Reduced) -> None:
    """Write the file completely or not at all, and log a warning if it cannot be written."""
    tensors = {f"{layer}/{part}": tensor for layer, parts in reduced.items() for part, tensor in parts.items()}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        atomic.save_tensors(file, tensors, {"digest": _digest(tensors)})
    except (OSError, SafetensorError) as error:
        _log.warning("nalora: %s could not be kept: %s", file, error)


def _read(file: Path) -> Reduced | None:
    if not file.is_file():
        return None
    try:
        with safe_open(file, "pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a mapping
            intact = (opened.metadata() or {}).get("digest") == _digest(tensors)
    except (OSError, SafetensorError):
        intact = False
    if not intact:
        _log.warning("nalora: %s is damaged and is computed again", file)
        return None
    reduced: Reduced = {}
    for name, tensor in tensors.items():
        layer, _, part = name.rpartition("/")
        reduced.setdefault(layer, {})[part] = tensor
    return reduced


def _digest(tensors: Mapping[str, Tensor]) -> str:
    content = hashlib.blake2b(digest_size=24)
    _update(content, tensors)
    return content.hexdigest()


def _update(content: Any, tensors: Mapping[str, Tensor]) -> None:
    for name in sorted(tensors):
        tensor = tensors[name]
        content.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        content.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
