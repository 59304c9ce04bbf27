"""Adapters in vLLM's form: what is exact there is converted, everything else is refused by name."""

from __future__ import annotations

import peft
import pytest
import tiny
import torch
from exported_models import model_for
from served import serve

import nalora
from nalora.methods.served_form import max_lora_rank, refuse_unserved, save_served
from nalora.models.adapters import adapter_config


@pytest.mark.parametrize("settings", [
    {}, {"use_rslora": True}, {"rank_pattern": {"q_proj": 2, "down_proj": 9}}, {"alpha_pattern": {"v_proj": 3}},
    {"use_rslora": True, "rank_pattern": {"layers.0.mlp.up_proj": 7}},
])  # fmt: skip
def test_a_server_with_one_rank_and_scaling_computes_the_same(settings, tmp_path):
    model = tiny.with_lora(model_for("llama", 64), lora_b=0.1, **settings).eval()
    with torch.no_grad():
        expected = model(tiny.tokens()).logits
        rank = save_served(model, tmp_path)
        found = serve(model_for("llama", 64), tmp_path)(tiny.tokens()).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5 * float(expected.abs().max()))
    refuse_unserved(adapter_config(tmp_path), tmp_path)
    assert rank == (16 if "down_proj" in settings.get("rank_pattern", {}) else 8)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("config", "words"), [
    (lambda: peft.LoraConfig(use_dora=True, target_modules=["q_proj"]), "DoRA"),
    (lambda: peft.LoraConfig(bias="all", target_modules=["q_proj"]), "biases"),
    (lambda: peft.LoraConfig(lora_bias=True, target_modules=["q_proj"]), "biases"),
    (lambda: peft.LoraConfig(modules_to_save=["norm"], target_modules=["q_proj"]), r"modules_to_save: \['norm'\]"),
    (lambda: peft.LoraConfig(trainable_token_indices=[1], target_modules=["q_proj"]), "trainable_token_indices"),
    (lambda: peft.LoraConfig(init_lora_weights="pissa", target_modules=["q_proj"]), "pissa.*a changed base"),
    (lambda: peft.LoHaConfig(target_modules=["q_proj"]), "the tuner LOHA"),
])  # fmt: skip
def test_what_vllm_cannot_take_is_refused_by_name(config, words, tmp_path):
    peft.get_peft_model(model_for("llama", 64), config()).save_pretrained(tmp_path)
    with pytest.raises(nalora.NALoRAError, match=f"{words}.*export --to merged"):
        refuse_unserved(adapter_config(tmp_path), tmp_path)


def test_adapters_of_embeddings_and_ranks_that_are_too_large_are_refused(tmp_path):
    model = peft.get_peft_model(model_for("llama", 64), peft.LoraConfig(target_modules=["embed_tokens"]))
    with pytest.raises(nalora.NALoRAError, match="embedding"):
        save_served(model, tmp_path)
    assert [max_lora_rank(rank) for rank in (1, 2, 16, 17, 300, 512)] == [1, 8, 16, 32, 320, 512]
    with pytest.raises(nalora.NALoRAError, match="at most 512"):
        max_lora_rank(513)
