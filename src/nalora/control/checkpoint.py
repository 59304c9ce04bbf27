"""The controller's state on disk: one versioned safetensors file, written atomically."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nalora.config import NALoRAConfig
from nalora.control.decision import BlockGroup
from nalora.errors import NALoRAError
from nalora.files import atomic, outputs

FILE_NAME = "nalora_state.safetensors"
# Version 2 has the blocks of experts, which version 1 did not control; its tensors of other blocks are the same.
VERSION = 2
_READABLE = (1, 2)


def state_of(groups: list[BlockGroup], config: NALoRAConfig) -> dict[str, Any]:
    """Return the state of all blocks as ``block/field`` tensors, with the version and the configuration."""
    tensors = {key: tensor.clone() for key, tensor in _tensors(groups).items()}
    return {"version": VERSION, "config": config.to_dict(), "tensors": tensors}


def _tensors(groups: list[BlockGroup]) -> dict[str, Tensor]:
    return {
        f"{name}/{field}": group.of_block(getattr(group, field), index)
        for group in groups
        for index, name in enumerate(group.names)
        for field in BlockGroup.STATE
    }


def restore(groups: list[BlockGroup], config: NALoRAConfig, state: dict[str, Any]) -> None:
    """Check a state against the blocks, then copy it into them."""
    version = state.get("version")
    if version not in _READABLE:
        raise NALoRAError(
            "nalora state",
            found=f"version {version!r}",
            expected=f"version {' or '.join(map(str, _READABLE))}",
            fix="resume with the nalora release that wrote it, or start a new run",
        )
    tensors: dict[str, Tensor] = state["tensors"]
    targets = _tensors(groups)
    new = {f"{name}/{field}" for group in groups if group.experts for name in group.names for field in group.STATE}
    if version == 1 and (new := new - tensors.keys()):
        warnings.warn("nalora: a state without experts; their averages start anew", stacklevel=3)
        targets = {key: target for key, target in targets.items() if key not in new}
    _check_same_blocks(targets, tensors)
    if (saved := state.get("config")) is not None:
        now = json.loads(atomic.json_text(config.to_dict()))
        changed = [key for key, value in json.loads(atomic.json_text(saved)).items() if now.get(key) != value]
        if changed:
            warnings.warn(f"nalora: settings that differ from the saved ones: {', '.join(changed)}", stacklevel=3)
    with torch.no_grad():
        for key, target in targets.items():
            target.copy_(tensors[key])


def _check_same_blocks(targets: dict[str, Tensor], tensors: dict[str, Tensor]) -> None:
    shapes = {key: tuple(t.shape) for key, t in tensors.items()}
    for key, target in targets.items():
        if shapes.get(key) != tuple(target.shape):
            raise NALoRAError(
                key,
                found=f"a saved shape of {shapes[key]}" if key in shapes else "no such block in the saved state",
                expected=f"shape {tuple(target.shape)}: a state saved from this model with these adapters",
                fix="resume from a checkpoint of the same base model and target_modules",
            )
    if extra := sorted(set(shapes) - set(targets)):
        raise NALoRAError(
            extra[0],
            found="a saved block that this model does not have",
            expected=f"only the {len(targets) // len(BlockGroup.STATE)} blocks of this model",
            fix="resume from a checkpoint of the same base model and target_modules",
        )


def save(state: dict[str, Any], folder: Path) -> Path:
    """Write the state into `folder`, which is created if necessary, and return the file's path.

    Raises:
        NALoRAError: the folder has a file of that name that nalora did not write.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE_NAME
    outputs.refuse_foreign_files([path], _is_state, option="folder", kind="a state")
    metadata = {"version": str(state["version"]), "config": atomic.json_text(state["config"])}
    atomic.save_tensors(path, state["tensors"], metadata)
    return path


def _is_state(head: bytes) -> bool:
    """Return whether a file is a state, by the metadata at the start of its safetensors header, in any order."""
    start = head[8:]
    return start.startswith(b'{"__metadata__":{') and b'"version":' in start and b'"config":' in start


def load(folder: Path) -> dict[str, Any]:
    """Read a state.

    Raises:
        NALoRAError: no such file, or a damaged one.
    """
    path = folder / FILE_NAME
    if not path.is_file():
        raise NALoRAError(
            str(path),
            found="no controller state in this checkpoint",
            expected=f"{FILE_NAME}, which nalora writes with the optimizer's state",
            fix="resume from a checkpoint of NA-LoRA, or start a new run",
        )
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 — not a mapping
        version, config = int(metadata["version"]), json.loads(metadata["config"])
    except (SafetensorError, KeyError, ValueError, OSError) as error:
        raise NALoRAError(
            str(path),
            found=f"a damaged file ({error})",
            expected="a complete state file written by nalora",
            fix="resume from an earlier checkpoint",
        ) from error
    return {"version": version, "config": config, "tensors": tensors}
