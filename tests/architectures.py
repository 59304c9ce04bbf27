"""Small models of many architectures, as transformers builds them, and one that only this project's tests have."""

from __future__ import annotations

import torch
import transformers as tf
from torch import nn

DECODER = dict(
    hidden_size=32,
    intermediate_size=56,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
ENCODER = dict(hidden_size=32, intermediate_size=56, num_hidden_layers=2, num_attention_heads=4)
T5 = dict(d_model=32, d_ff=56, d_kv=8, num_layers=2, num_heads=4, vocab_size=64, decoder_start_token_id=0)
TEXT = dict(vocab_size=64, pad_token_id=0, bos_token_id=1, eos_token_id=2)
IMAGE = dict(image_size=32, patch_size=16)


def architecture(name: str) -> nn.Module:
    torch.manual_seed(0)
    match name:
        case "Llama" | "Mistral" | "Qwen2" | "SmolLM3" | "Olmo2" | "Phi3":
            return getattr(tf, f"{name}ForCausalLM")(getattr(tf, f"{name}Config")(**DECODER))
        case "Qwen3" | "Gemma2" | "Glm4":
            return getattr(tf, f"{name}ForCausalLM")(getattr(tf, f"{name}Config")(**DECODER, head_dim=8))
        case "Gemma3":
            return tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(**DECODER, head_dim=8))
        case "T5 v1.0":
            return tf.T5ForConditionalGeneration(tf.T5Config(**T5))
        case "T5 v1.1":
            return tf.T5ForConditionalGeneration(tf.T5Config(**T5, feed_forward_proj="gated-gelu"))
        case "CLIP":
            return tf.CLIPModel(tf.CLIPConfig(text_config=ENCODER | TEXT, vision_config=ENCODER | IMAGE))
        case "ViT":
            return tf.ViTForImageClassification(tf.ViTConfig(**ENCODER, **IMAGE))
        case "BERT":
            return tf.BertForSequenceClassification(tf.BertConfig(**ENCODER, vocab_size=64))
        case "ModernBERT":
            ids = dict(cls_token_id=1, sep_token_id=2)
            return tf.ModernBertForMaskedLM(tf.ModernBertConfig(**ENCODER, **TEXT, **ids))
        case "GPT-2":
            return tf.GPT2LMHeadModel(
                tf.GPT2Config(n_embd=32, n_inner=56, n_layer=2, n_head=4, vocab_size=64, bos_token_id=1, eos_token_id=2)
            )
        case "OPT":
            sizes = dict(hidden_size=32, ffn_dim=56, num_hidden_layers=2, num_attention_heads=4)
            return tf.OPTForCausalLM(tf.OPTConfig(**sizes, **TEXT, word_embed_proj_dim=32))
        case "Qwen2-MoE":
            experts = dict(num_experts=4, moe_intermediate_size=24, shared_expert_intermediate_size=56)
            return tf.Qwen2MoeForCausalLM(tf.Qwen2MoeConfig(**DECODER, **experts))
        case "Qwen3-MoE":
            experts = dict(num_experts=4, moe_intermediate_size=24, head_dim=8, mlp_only_layers=[0])
            return tf.Qwen3MoeForCausalLM(tf.Qwen3MoeConfig(**DECODER, **experts))
        case "Mixtral":
            return tf.MixtralForCausalLM(tf.MixtralConfig(**DECODER, num_local_experts=4))
    raise KeyError(name)


def dense_gpt_oss(limit: float = 7.0) -> nn.Module:
    """gpt-oss's interleaved FFN with a linear layer in place of the 3-D expert parameters."""

    class InterleavedFFN(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_up_proj = nn.Linear(16, 48)
            self.down_proj = nn.Linear(24, 16)

        def forward(self, x):
            gate_up = self.gate_up_proj(x)
            gate, up = gate_up[..., ::2].clamp(max=limit), gate_up[..., 1::2].clamp(-limit, limit)
            return self.down_proj((up + 1) * (gate * torch.sigmoid(gate * 1.702)))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([InterleavedFFN() for _ in range(2)])

        def forward(self, x):
            for layer in self.layers:
                x = x + layer(x)
            return x

    return Model()
