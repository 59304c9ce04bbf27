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
    "smollm2-135m": Shape(576, 1536, 30, 9, 3, 49152),
    "llama-3.2-1b": Shape(2048, 8192, 16, 32, 8, 128256),
    "llama-3.1-8b": Shape(4096, 14336, 32, 32, 8, 128256),
}


def base(shape: Shape, *, seed: int = 0) -> torch.nn.Module:
    """Return the model without adapters: bf16 weights on the GPU."""
    config = transformers.LlamaConfig(
        vocab_size=shape.vocabulary, hidden_size=shape.hidden, intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.key_value_heads,
        rope_theta=500000.0, max_position_embeddings=8192, attn_implementation="sdpa", use_cache=False,
    )  # fmt: skip
    torch.manual_seed(seed)
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        model = transformers.LlamaForCausalLM(config)
        torch.set_default_dtype(torch.float32)
    return model


def build(
    shape: Shape, *, checkpointing: bool = False, liger: bool = False, fused_loss: bool = True, seed: int = 0
) -> torch.nn.Module:
    """Return a bf16 base with r = 8 adapters in float32, in training mode on the GPU.

    Args:
        shape: the model's sizes.
        checkpointing: whether layers are recomputed in the backward pass.
        liger: whether Liger's kernels replace norms, rotary embedding and, with `fused_loss`, the loss.
        fused_loss: False for CUDA graphs, because Liger's fused loss copies a number to the host.
        seed: of the random weights.
    """
    model = base(shape, seed=seed)
    if liger:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama(model=model, fused_linear_cross_entropy=fused_loss, cross_entropy=False)
    model = peft.get_peft_model(model, peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.01)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    return model.train()
