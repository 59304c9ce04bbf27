"""Settings that llama.cpp computes differently are refused; all others mean the same there as in transformers."""

from __future__ import annotations

import pytest
import torch
import transformers
from exported_models import model_for

import nalora
from nalora.models.gguf_architectures import Architecture


@pytest.mark.parametrize("model_type", ["mistral", "gpt2", "qwen3_moe", "gemma"])
def test_other_architectures_are_refused_by_name(model_type):
    with pytest.raises(nalora.NALoRAError, match=f"{model_type!r}.*one of llama, qwen2"):
        Architecture(transformers.AutoConfig.for_model(model_type))


@pytest.mark.parametrize(("architecture", "setting", "value"), [
    ("llama", "rope_parameters", {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
    ("llama", "rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "beta_fast": 16,
                                  "original_max_position_embeddings": 64}),
    ("llama", "hidden_act", "relu"),
    ("qwen3", "attention_bias", True),
    ("qwen2", "layer_types", ["sliding_attention"] * 3),
    ("gemma2", "query_pre_attn_scalar", 100),
    ("gemma2", "final_logit_softcapping", None),
    ("gemma3_text", "hidden_activation", "silu"),
    ("gemma3_text", "attn_logit_softcapping", 50.0),
])  # fmt: skip
def test_a_setting_that_llama_cpp_does_not_follow_is_refused(architecture, setting, value):
    config = model_for(architecture, 64).config
    Architecture(config)
    setattr(config, setting, value)
    with pytest.raises(nalora.NALoRAError, match="llama.cpp computes the same"):
        Architecture(config)


def test_llama_3_divides_frequencies_as_transformers_does():
    rope = dict(rope_type="llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
    rope["original_max_position_embeddings"] = 64
    scaled, plain = (
        model_for("llama", 64, head_dim=32, rope_parameters=each).model.rotary_emb.inv_freq
        for each in (rope, dict(rope_type="default", rope_theta=5e5))
    )
    ((name, factors),) = Architecture(model_for("llama", 64, head_dim=32, rope_parameters=rope).config).additional()
    assert name == "rope_freqs.weight"
    torch.testing.assert_close(plain / factors, scaled, rtol=1e-6, atol=0)
    assert 1 < factors.unique().numel() > 2


def test_heads_of_a_llama_are_reordered_to_pairs():
    architecture = Architecture(model_for("llama", 64).config)
    rows = torch.arange(64.0).reshape(64, 1).expand(64, 3)
    order = architecture.changed("model.layers.0.self_attn.q_proj.weight", rows)[:, 0].tolist()
    assert order[:6] == [0, 8, 1, 9, 2, 10]
    assert order[16:19] == [16, 24, 17]
    assert torch.equal(architecture.changed("model.layers.0.self_attn.v_proj.weight", rows), rows)


def test_the_usual_pattern_of_windows_is_left_to_llama_cpp():
    assert "sliding_window_pattern" not in Architecture(model_for("gemma2", 64).config).settings()
    unusual = model_for("gemma3_text", 64, layer_types=["full_attention", "sliding_attention", "full_attention"])
    assert Architecture(unusual.config).settings()["sliding_window_pattern"] == [False, True, False]
