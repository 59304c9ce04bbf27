"""Grouped and unmasked attention compute what transformers' own does, and the cache is restored."""

from __future__ import annotations

import contextlib

import pytest
import tiny
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import nalora
from nalora import NALoRAConfig
from nalora.models.attention import grouped_attention, grouped_sdpa, is_plain_decoder, unmasked_attention, without_cache


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
    found, _ = grouped_sdpa(module, query, key, value, mask, scaling=scaling, dropout=0.0)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_shared_keys_are_not_copied(monkeypatch):
    """One token with a mask is not passed to transformers, which would copy shared keys."""
    module = nn.Module()
    module.num_key_value_groups = 3
    query, key = torch.randn(2, 6, 1, 4), torch.randn(2, 2, 7, 4)
    mask = torch.ones(2, 1, 1, 7, dtype=torch.bool)
    copied = []
    monkeypatch.setattr("transformers.integrations.sdpa_attention.repeat_kv", lambda keys, n: copied.append(n) or keys)
    grouped_sdpa(module, query, key, key, mask)
    assert not copied


@pytest.mark.parametrize("before", ["sdpa", "eager"])
@pytest.mark.parametrize("context", [grouped_attention, unmasked_attention])
def test_the_model_s_own_attention_is_restored(before, context):
    model = tiny.llama()
    inner = model.get_base_model()
    inner.set_attn_implementation(before)
    with contextlib.suppress(ZeroDivisionError), context(model):
        assert (inner.config._attn_implementation == before) == (before == "eager")
        raise ZeroDivisionError
    assert inner.config._attn_implementation == before


def test_pads_on_the_right_need_no_mask():
    """Loss, gradients and gate statistics are the same for a batch with rows of different lengths."""
    ids = torch.randint(1, 60, (3, 12), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(12) < torch.tensor([[12], [7], [3]])).long()
    batch = {"input_ids": ids * mask, "attention_mask": mask, "labels": torch.where(mask.bool(), ids, -100)}
    results = []
    for context in (lambda model: contextlib.nullcontext(), unmasked_attention):
        model = tiny.llama(torch.float64).train()
        optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
        controller = nalora.attach(model, optimizer, NALoRAConfig())
        masks = []
        layer = model.get_base_model().model.layers[0]
        layer.register_forward_pre_hook(
            lambda _, args, options, seen=masks: seen.append(options["attention_mask"]), with_kwargs=True
        )
        with context(model):
            loss = model(**batch).loss
            loss.backward()
        gradients = {name: each.grad for name, each in model.named_parameters() if each.requires_grad}
        optimizer.step()
        assert (masks[0] is None) == (context is unmasked_attention)
        results.append((loss, gradients, controller.metrics()))
    (loss, gradients, metrics), (other_loss, other_gradients, other_metrics) = results
    torch.testing.assert_close(other_loss, loss, rtol=1e-12, atol=0)
    for name, gradient in gradients.items():
        torch.testing.assert_close(other_gradients[name], gradient, rtol=1e-9, atol=1e-14)
    assert other_metrics == pytest.approx(metrics, rel=1e-9)


def test_who_is_a_plain_decoder():
    assert is_plain_decoder(tiny.llama())
    assert is_plain_decoder(tiny.llama().unload())
    config = dict(vocab_size=64, d_model=16, d_ff=32, num_layers=1, num_heads=2, d_kv=8)
    assert not is_plain_decoder(transformers.T5ForConditionalGeneration(transformers.T5Config(**config)))
    sliding = transformers.MistralConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
                                         num_attention_heads=2, num_key_value_heads=2, sliding_window=4)  # fmt: skip
    assert not is_plain_decoder(transformers.MistralForCausalLM(sliding))


@pytest.mark.parametrize("caching", [True, False])
def test_the_cache_is_put_back_after_an_error(caching):
    model = tiny.llama(torch.float32)
    model.config.use_cache = caching
    switch = without_cache(model)
    switch.__enter__()
    assert model.config.use_cache is False
    assert not switch.__exit__(ValueError, ValueError("inside"), None)
    assert model.config.use_cache is caching


def test_a_model_without_such_a_setting_is_left_alone():
    model = torch.nn.Linear(2, 2)
    with without_cache(model):
        pass
    assert not hasattr(model, "config")
