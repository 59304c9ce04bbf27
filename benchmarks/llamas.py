"""Llamas with random weights and the shapes of real models, with LoRA on all linear layers."""

from __future__ import annotations

from typing import NamedTuple

import peft
import torch
import transformers


class Shape(NamedTuple):
    hidden: int
    ffn: int
    layers: int
    heads: int
    key_value_heads: int
    vocabulary: int


SHAPES = {
    "tiny": Shape(64, 128, 2, 4, 2, 512),
    "smollm2-135m": Shape(576, 1536, 30, 9, 3, 49152),
    "llama-3.2-1b": Shape(2048, 8192, 16, 32, 8, 128256),
    "llama-3.1-8b": Shape(4096, 14336, 32, 32, 8, 128256),
}


def base(
    shape: Shape, *, seed: int = 0, device: str = "cuda", dtype: torch.dtype = torch.bfloat16, length: int = 8192
) -> torch.nn.Module:
    """Return the model without adapters, by default with bf16 weights on the GPU."""
    config = transformers.LlamaConfig(
        vocab_size=shape.vocabulary, hidden_size=shape.hidden, intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.key_value_heads,
        rope_theta=500000.0, max_position_embeddings=max(8192, length), attn_implementation="sdpa", use_cache=False,
    )  # fmt: skip
    torch.manual_seed(seed)
    with torch.device(device):
        torch.set_default_dtype(dtype)
        model = transformers.LlamaForCausalLM(config)
        torch.set_default_dtype(torch.float32)
    return model


def quantise(model: torch.nn.Module) -> None:
    """Replace the linear layers of all blocks by bitsandbytes' 4-bit ones (NF4); the output layer stays as it is."""
    import bitsandbytes as bnb

    for block in model.model.layers:
        for parent in (block.self_attn, block.mlp):
            for name, linear in list(parent.named_children()):
                if not isinstance(linear, torch.nn.Linear):
                    continue
                weight = linear.weight
                layer = bnb.nn.Linear4bit(
                    linear.in_features, linear.out_features, bias=False, compute_dtype=weight.dtype, quant_type="nf4",
                    device="meta",
                )  # fmt: skip
                frozen = bnb.nn.Params4bit(weight.data, requires_grad=False, quant_type="nf4", module=layer)
                layer.weight = frozen.to(weight.device)
                setattr(parent, name, layer)
    # PEFT reads this to choose its layers for 4-bit weights.
    model.is_loaded_in_4bit = True


def build(
    shape: Shape,
    *,
    checkpointing: bool = False,
    seed: int = 0,
    rank: int = 8,
    four_bit: bool = False,
    device: str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    length: int = 8192,
) -> torch.nn.Module:
    """Return a frozen base with adapters in float32, in training mode.

    Args:
        shape: the model's sizes.
        checkpointing: whether layers are recomputed in the backward pass.
        seed: of the random weights.
        rank: of all adapters; alpha is twice as large.
        four_bit: whether the frozen linear layers are quantised to NF4.
        device: of the model.
        dtype: of the frozen weights.
        length: the longest sequence.
    """
    model = base(shape, seed=seed, device=device, dtype=dtype, length=length)
    if four_bit:
        quantise(model)
    model = peft.get_peft_model(model, peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.01)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    return model.train()
