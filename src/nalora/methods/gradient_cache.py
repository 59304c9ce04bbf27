"""What was made of gradients, kept by content: found again where weights, batches and settings are the same."""

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

# Of each layer by name, the tensors that were kept, by what they are.
Reduced = dict[str, dict[str, Tensor]]

_log = logging.getLogger("nalora")
# Of the files' form and of how gradients are taken: another number finds nothing of before. Up to 1, a batch was what
# one pass had, not what an optimizer step has.
_VERSION = 2
# What a configuration says that no gradient depends on.
_NAMES_ONLY = ("_name_or_path", "name_or_path", "transformers_version", "use_cache")


def file_name(model: nn.Module, batches: Iterable[Batch], device: torch.device, settings: Mapping[str, Any]) -> str:
    """Named by all that gradients depend on: weights, configuration, every process's batches, settings, layers."""
    content = hashlib.blake2b(digest_size=24)
    known = {"version": _VERSION, "settings": dict(settings), "model": _config(model)}
    known["layers"] = [name for name, _ in lora_layers(model)]
    content.update(json.dumps(known, sort_keys=True, default=str).encode())
    # A quantised layer's scales are in its state, not among its parameters; the adapters do not act.
    state = dict(model.named_buffers()) | model.state_dict()
    for name in sorted(name for name in state if ".lora_" not in name):
        _add(content, name, state[name])
    content.update(_of_all_processes(batches, device))
    return f"{content.hexdigest()}.safetensors"


def read(file: Path, layers: set[str], device: torch.device) -> Reduced | None:
    """What is kept there of these layers, if every process finds it whole."""
    found = _read(file)
    usable = found is not None and set(found) == layers
    agreed = processes.sum_over_processes(torch.tensor(int(usable), device=device))
    return found if usable and int(agreed) == processes.count() else None


def write(file: Path, reduced: Reduced) -> None:
    """Keep it, whole or not at all. A cache that cannot be written costs time, not the run."""
    tensors = {f"{layer}/{part}": each for layer, parts in reduced.items() for part, each in parts.items()}
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
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
            whole = (opened.metadata() or {}).get("digest") == _digest(tensors)
    except (OSError, SafetensorError):
        whole = False
    if not whole:
        _log.warning("nalora: %s is damaged and made again", file)
        return None
    reduced: Reduced = {}
    for name, tensor in tensors.items():
        layer, _, part = name.rpartition("/")
        reduced.setdefault(layer, {})[part] = tensor
    return reduced


def _digest(tensors: Mapping[str, Tensor]) -> str:
    content = hashlib.blake2b(digest_size=24)
    for name in sorted(tensors):
        _add(content, name, tensors[name])
    return content.hexdigest()


def _of_all_processes(batches: Iterable[Batch], device: torch.device) -> bytes:
    own = hashlib.blake2b(digest_size=32)
    for number, batch in enumerate(batches):
        for name in sorted(batch):
            _add(own, f"{number} {name}", batch[name])
    every = torch.zeros(processes.count(), 4, dtype=torch.long, device=device)
    every[processes.rank()] = torch.frombuffer(bytearray(own.digest()), dtype=torch.long).to(device)
    return processes.sum_over_processes(every).cpu().numpy().tobytes()


def _add(content: Any, name: str, tensor: Tensor) -> None:
    content.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
    content.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


def _config(model: nn.Module) -> dict[str, Any]:
    config: Any = getattr(model, "config", None)
    said: dict[str, Any] = config.to_dict() if hasattr(config, "to_dict") else {}
    return {name: value for name, value in said.items() if name not in _NAMES_ONLY}
