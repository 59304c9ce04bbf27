"""Attention that reads shared keys where they lie is transformers' own."""

from __future__ import annotations

import contextlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from nalora.evaluation.grouped_attention import attend, grouped


@given(groups=st.integers(1, 3), shared=st.integers(1, 4), tokens=st.integers(1, 3), masked=st.booleans(),
       scaling=st.sampled_from([None, 0.3]), seed=st.integers(0, 99))  # fmt: skip
def test_it_is_sdpa(groups, shared, tokens, masked, scaling, seed):
    generator = torch.Generator().manual_seed(seed)
    module = nn.Module()
    module.num_key_value_groups, module.is_causal = shared, True
    query = torch.randn(2, groups * shared, tokens, 4, generator=generator, dtype=torch.float64)
    key, value = (torch.randn(2, groups, 7, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    mask = torch.rand(2, 1, tokens, 7, generator=generator) < 0.5 if masked else None
    if mask is not None:
        mask[..., 0] = True
    expected, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, dropout=0.0)
    found, _ = attend(module, query, key, value, mask, scaling=scaling, dropout=0.0)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("before", ["sdpa", "eager"])
def test_the_model_s_own_attention_comes_back(before):
    config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                         num_attention_heads=4, num_key_value_heads=2, attn_implementation=before)  # fmt: skip
    model = LlamaForCausalLM(config)
    with contextlib.suppress(ZeroDivisionError), grouped(model):
        assert (model.config._attn_implementation == before) == (before == "eager")
        raise ZeroDivisionError
    assert model.config._attn_implementation == before
