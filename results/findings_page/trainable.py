"""The parameters that full fine-tuning trains and LoRA does not, counted on a model without weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tables.run_tables import read_tables

# SmolLM2-135M. The total is checked against the stored runs.
SHAPE = {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True,
}  # fmt: skip


def counts() -> dict[str, int]:
    """Return the number of parameters of linear layers, embeddings (which are the head too) and norms."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    groups = {"linear layers": 0, "embeddings, shared with the head": 0, "norms": 0}
    for name, parameter in model.named_parameters():
        kind = "norms" if "norm" in name else "embeddings, shared with the head" if "embed" in name else "linear layers"
        groups[kind] += parameter.numel()
    return groups


def trained_parameters(results: Path) -> dict[str, int]:
    """Return the stored number of trainable parameters of full fine-tuning and of LoRA."""
    found: dict[str, Any] = {}
    for run in read_tables(results).values():
        if run.settings["method"] in ("full", "lora"):
            found.setdefault(run.settings["method"], set()).add(run.result["trainable_parameters"])
    return {method: number for method, (number,) in found.items()}


def trainable(results: Path) -> list[str]:
    """Return a sentence with the parameters of both."""
    groups, trained = counts(), trained_parameters(results)
    total = sum(groups.values())
    parts = [f"{number:,} in {kind} ({number / total:.2%})".replace("%", " %") for kind, number in groups.items()]
    return [
        f"- **What full fine-tuning trains.** All {total:,} parameters: {', '.join(parts[:-1])} and {parts[-1]}.",
        f"  LoRA trains {trained['lora']:,} ({trained['lora'] / total:.1%}),".replace("%", " %")
        + " factors of the linear layers alone: embeddings, head and norms stay",
        "  frozen. The gap is between these two, and the stored runs do not separate rank from embeddings and norms.",
    ]
