"""A small Llama for the tests of methods."""

from __future__ import annotations

import torch
import transformers

VOCABULARY = 32
# Tuners whose defaults are made for larger layers, and (IA)³, which must be given its FFN layers.
TUNER_SETTINGS = {
    "c3a": {"block_size": 16},
    "fourierft": {"n_frequency": 100},
    "ia3": {"feedforward_modules": ["down_proj"], "target_modules": ["k_proj", "v_proj", "down_proj"]},
    "road": {"group_size": 16},
    "vblora": {"vector_length": 16, "num_vectors": 8},
    "waveft": {"n_frequency": 100},
}


def llama(dtype: torch.dtype = torch.float32, layers: int = 2, **settings) -> transformers.LlamaForCausalLM:
    """The same weights at every call; key and value projections are narrower than they are long."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        config = transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            initializer_range=0.1,
            pad_token_id=0,
            **settings,
        )
        return transformers.LlamaForCausalLM(config).to(dtype)


def tokens(batch: int = 4, length: int = 10, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))
