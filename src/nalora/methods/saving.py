"""Saved adapters that every library reads alike: one rank and one LoRA scaling for all layers.

PEFT's `rank_pattern` and `alpha_pattern` give layers different ranks and scalings, which other libraries ignore: vLLM
computes one α/r (α/√r for rsLoRA) from `adapter_config.json` for every layer. So an adapter whose layers differ is
written with A and B padded with zeros to the largest rank and the scaling multiplied into B.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn

from nalora.distributed.processes import is_first_process
from nalora.distributed.shards import gathered_state
from nalora.models.peft_names import ADAPTER


def save_adapter(model: nn.Module, folder: Path) -> None:
    """Write a PEFT model's adapter unchanged, or with one rank and scaling where its layers differ.

    Every process must call it, since each can hold a shard of the parameters; the first process writes.
    """
    trained: Any = model
    state = gathered_state(model)
    if not is_first_process():
        return
    if _is_uniform(model):
        trained.save_pretrained(folder, state_dict=state)
        return
    import peft

    # PEFT selects what belongs to the adapter: a DoRA magnitude or a trained module is saved with the factors.
    tensors: dict[str, Tensor] = peft.get_peft_model_state_dict(model, state_dict=state)
    layers = dict(_layers(model))
    rank = max(layer.r[ADAPTER] for layer in layers.values())
    for name, layer in layers.items():
        for factor, pad in (("A", _padded_rows), ("B", _padded_columns)):
            for key in (f"{name}.lora_{factor}.weight", f"{name}.lora_embedding_{factor}"):
                if key in tensors:
                    tensors[key] = pad(tensors[key], layer, rank)
        if (bias := f"{name}.lora_B.bias") in tensors:
            tensors[bias] = layer.scaling[ADAPTER] * tensors[bias]
    config = copy.deepcopy(trained.active_peft_config)
    config.r = config.lora_alpha = rank
    config.use_rslora, config.rank_pattern, config.alpha_pattern = False, {}, {}
    _write(model, folder, tensors, config)


def write_lora(model: nn.Module, folder: Path, tensors: dict[str, Tensor], **settings: Any) -> None:
    """Let the first process write these tensors, by PEFT's file names, as a LoRA adapter of a PEFT model.

    `settings` are fields of `peft.LoraConfig` that differ from the model's own.
    """
    import peft

    trained: Any = model
    # These fields describe where the adapter is; all others describe how it was trained.
    names = ("base_model_name_or_path", "revision", "task_type", "target_modules", "lora_dropout", "fan_in_fan_out")
    fields = {name: getattr(trained.active_peft_config, name) for name in names}
    _write(model, folder, tensors, peft.LoraConfig(**fields | settings))


def _write(model: nn.Module, folder: Path, tensors: dict[str, Tensor], config: Any) -> None:
    if not is_first_process():
        return
    wrapped: Any = model
    config.inference_mode = True
    base = type(wrapped.get_base_model())
    mapping = None if config.task_type else {"base_model_class": base.__name__, "parent_library": base.__module__}
    folder.mkdir(parents=True, exist_ok=True)
    on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(on_cpu, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(str(folder), auto_mapping_dict=mapping)


def _layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    from peft.tuners.lora.layer import LoraLayer

    for name, module in model.named_modules():
        if isinstance(module, LoraLayer) and ADAPTER in module.r:
            yield name, module


def _is_uniform(model: nn.Module) -> bool:
    """Return whether every layer has the rank and scaling that the configuration's r, α and use_rslora give."""
    config: Any = getattr(model, "active_peft_config", None)
    if getattr(config, "peft_type", None) != "LORA":  # full fine-tuning, or another kind of adapter
        return True
    scaling = config.lora_alpha / (math.sqrt(config.r) if config.use_rslora else config.r)
    return all(
        layer.r[ADAPTER] == config.r and math.isclose(layer.scaling[ADAPTER], scaling, rel_tol=1e-9)
        for _, layer in _layers(model)
    )


def _padded_rows(a: Tensor, layer: Any, rank: int) -> Tensor:
    """Return A with `rank` rows per expert (a layer without experts has one). PEFT keeps experts × r rows."""
    experts = getattr(layer, "num_experts", 1)
    by_expert = a.reshape(experts, -1, *a.shape[1:])
    padded = by_expert.new_zeros(experts, rank, *a.shape[1:])
    padded[:, : by_expert.shape[1]] = by_expert
    return padded.flatten(0, 1)


def _padded_columns(b: Tensor, layer: Any, rank: int) -> Tensor:
    """Return s·B with `rank` columns per expert. PEFT keeps r × experts columns, the expert index changing fastest."""
    experts = getattr(layer, "num_experts", 1)
    by_expert = b.reshape(b.shape[0], -1, experts, *b.shape[2:])
    padded = by_expert.new_zeros(b.shape[0], rank, experts, *b.shape[2:])
    padded[:, : by_expert.shape[1]] = layer.scaling[ADAPTER] * by_expert
    return padded.flatten(1, 2)
