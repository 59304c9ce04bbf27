"""The form of an adapter that vLLM reads: LoRA factors of linear layers with one rank and one scaling.

vLLM (source of 0.26) refuses DoRA, `modules_to_save` and biases, ignores patterns of ranks and scalings, and computes
with the stock base model, whatever the adapter's initialisation subtracted from it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from nalora.errors import NALoRAError, refuse_first
from nalora.methods.saving import save_adapter
from nalora.models.adapters import changes_base

# The values of --max-lora-rank that vLLM accepts.
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


def refuse_unserved(config: dict[str, Any], folder: Path) -> None:
    """Raise NALoRAError for an adapter that vLLM would refuse, or compute differently; `config` is its JSON file."""
    kind, start = str(config.get("peft_type")), config.get("init_lora_weights")
    merge = "export --to merged, which every server loads"
    found = (
        (kind != "LORA", f"an adapter of the tuner {kind}"),
        (bool(config.get("use_dora")), "DoRA, which vLLM does not support"),
        (config.get("bias", "none") != "none" or bool(config.get("lora_bias")), "trained biases"),
        (bool(config.get("modules_to_save")), f"modules_to_save: {config.get('modules_to_save')}"),
        (bool(config.get("trainable_token_indices")), "trainable_token_indices"),
        (bool(config.get("layer_replication")), "layer_replication"),
        (bool(config.get("alora_invocation_tokens")), "alora_invocation_tokens"),
        (changes_base(config), f"init_lora_weights: {start}, which is relative to a changed base model"),
    )
    refuse_first(
        str(folder),
        "a LoRA adapter of linear layers, as vLLM reads it",
        [(holds, what, merge) for holds, what in found],
    )


def save_served(model: nn.Module, folder: Path) -> int:
    """Write a PEFT model's LoRA adapter with one rank and one scaling; return the value for --max-lora-rank.

    Raises:
        NALoRAError: an adapter of the embedding, or a rank above 512.
    """
    trained: Any = model
    embeddings = [name for name, _ in model.named_parameters() if "lora_embedding_" in name]
    if embeddings:
        raise NALoRAError(
            embeddings[0],
            found="an adapter of the embedding",
            expected="adapters of linear layers, which vLLM applies for every model",
            fix="export --to merged",
        )
    save_adapter(model, folder)
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "lora_A")]
    return max_lora_rank(max(int(layer.r[name]) for layer in layers for name in trained.active_adapters))


def max_lora_rank(rank: int) -> int:
    """Return the smallest value of --max-lora-rank for adapters of this rank. Raises NALoRAError above 512."""
    for allowed in _RANKS:
        if rank <= allowed:
            return allowed
    raise NALoRAError(
        f"rank {rank}", found="more than vLLM serves", expected=f"at most {_RANKS[-1]}", fix="export --to merged"
    )
