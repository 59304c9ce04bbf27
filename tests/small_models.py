"""Any decoder of transformers by its model type, small, with weights large enough to bend its gates."""

from __future__ import annotations

import inspect

import torch
import transformers
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY, WIDTH = 64, 56
# What sizes are called, over all architectures; each takes the names that it has.
SIZES = dict(
    vocab_size=VOCABULARY, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    hidden_size=32, d_model=32, n_embd=32, word_embed_proj_dim=32,
    num_hidden_layers=2, num_layers=2, n_layer=2, n_layers=2, decoder_layers=2,
    num_attention_heads=4, num_heads=4, n_head=4, n_heads=4, decoder_attention_heads=4, num_key_value_heads=2,
    head_dim=8, rotary_dim=4,
    intermediate_size=WIDTH, n_inner=WIDTH, ffn_dim=WIDTH, decoder_ffn_dim=WIDTH, d_ff=WIDTH, ffn_hidden_size=WIDTH,
    max_position_embeddings=64, n_positions=64, max_seq_len=64, initializer_range=0.2,
    num_experts=4, num_local_experts=4, n_routed_experts=4, moe_num_experts=4, num_experts_per_tok=2, moe_k=2,
    moe_intermediate_size=24, shared_expert_intermediate_size=WIDTH, moe_num_shared_experts=1,
    n_group=1, topk_group=1, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8,
    state_size=8, time_step_rank=8, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8, mamba_expand=1,
    resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, dropout=0.0, attention_dropout=0.0, hidden_dropout=0.0,
    activation_dropout=0.0, residual_dropout=0.0, embedding_dropout=0.0, attention_probs_dropout_prob=0.0,
    hidden_dropout_prob=0.0,
)  # fmt: skip


def causal_model(model_type: str, **settings) -> nn.Module:
    """The same weights at every call."""
    kind = type(transformers.AutoConfig.for_model(model_type))
    known = {*inspect.signature(kind).parameters, *getattr(kind, "__dataclass_fields__", {}), *kind.attribute_map}
    config = kind(**{name: size for name, size in SIZES.items() if name in known} | settings)
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])(config)
    return model.float()


def tokens() -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(0))
