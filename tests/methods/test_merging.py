"""Merged weights compute what the adapted model computes, for every kind of adapter that can be merged."""

from __future__ import annotations

import peft
import pytest
import tiny
import torch
from exported_models import byte_level, model_for

import nalora
from nalora.methods.merging import Agreement, Answers, answer, compare, merge


@pytest.fixture(scope="module")
def tokenizer():
    return byte_level("llama-bpe")


def randomised(model):
    """The adapter with parameters far from their initial values."""
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            noise = torch.randn(parameter.shape, generator=generator) * (0.5 if "magnitude" in name else 0.1)
            parameter.data += noise.to(parameter)
    return model.eval()


ADAPTERS = {
    "lora": lambda: peft.LoraConfig(r=4, target_modules="all-linear", rank_pattern={"q_proj": 2}),
    "rslora": lambda: peft.LoraConfig(r=4, use_rslora=True, target_modules="all-linear"),
    "dora": lambda: peft.LoraConfig(r=4, use_dora=True, target_modules="all-linear"),
    "embedding": lambda: peft.LoraConfig(r=4, target_modules=["embed_tokens", "q_proj"]),
    "output": lambda: peft.LoraConfig(r=4, target_modules=["lm_head"]),
    "modules to save": lambda: peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["norm"]),
    "saved output": lambda: peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"]),
    "saved embedding": lambda: peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["embed_tokens"]),
    "saved and adapted": lambda: peft.LoraConfig(r=4, target_modules=["lm_head"], modules_to_save=["embed_tokens"]),
    "saved ends": lambda: peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"]),
    "saved and tied": lambda: peft.LoraConfig(
        r=4, target_modules=["q_proj"], modules_to_save=["embed_tokens"], ensure_weight_tying=True
    ),
    "tokens": lambda: peft.LoraConfig(r=4, target_modules=["q_proj"], trainable_token_indices=[72, 101]),
    "loha": lambda: peft.LoHaConfig(r=4, target_modules=["q_proj", "down_proj"]),
    "ia3": lambda: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "oft": lambda: peft.OFTConfig(r=0, oft_block_size=8, target_modules=["q_proj"]),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ADAPTERS)
def test_merged_equals_unmerged(name, tied, tokenizer, tmp_path):
    if tied and name in ("rslora", "dora", "modules to save", "loha", "ia3", "oft"):
        pytest.skip("the embedding is not adapted")
    base = model_for("llama", 448, tie_word_embeddings=tied)
    plain = answer(base, tokenizer)
    model = randomised(peft.get_peft_model(base, ADAPTERS[name]()))
    before = answer(model, tokenizer)
    assert compare(before, plain, torch.float32).difference > 0.05
    merged = merge(model, torch.float32)
    agreement = compare(before, answer(merged, tokenizer), torch.float32)
    assert agreement.holds
    assert agreement.same == agreement.tokens > 0
    # What is saved says whether the output layer has weights of its own.
    merged.save_pretrained(tmp_path)
    read = type(merged).from_pretrained(tmp_path)
    assert compare(before, answer(read, tokenizer), torch.float32).holds
    assert read.config.tie_word_embeddings == (tied and name in ("lora", "saved and tied", "tokens"))


def test_a_layer_is_rounded_once():
    """PEFT rounds the update, then its sum with the weight."""
    model = tiny.llama(torch.float32)
    layer = model.base_model.model.model.layers[0].mlp.gate_proj
    weight = layer.base_layer.weight.data.bfloat16()
    exact = weight.float() + layer.get_delta_weight("default")
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data if "lora_" in name else parameter.data.bfloat16()
    merged = merge(model, torch.bfloat16)
    assert torch.equal(merged.model.layers[0].mlp.gate_proj.weight, exact.bfloat16())
    assert {parameter.dtype for parameter in merged.parameters()} == {torch.bfloat16}


def test_what_is_not_a_change_of_weights_is_refused():
    base = model_for("llama", 448)
    prompts = peft.get_peft_model(base, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    with pytest.raises(nalora.NALoRAError, match=r"PROMPT_TUNING.*cannot merge.*export --to peft"):
        merge(prompts, torch.float32)


def test_a_difference_beyond_rounding_does_not_hold(tokenizer):
    one, other = (answer(model_for("llama", 448, rms_norm_eps=eps), tokenizer) for eps in (1e-6, 1e-2))
    agreement = compare(one, other, torch.float32)
    assert not agreement.holds
    assert "greedy tokens equal" in str(agreement)
    assert not Agreement(float("nan"), 1.0, 0, 0, 1.0).holds


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("damaged", ["one", "other", "both"])
@pytest.mark.parametrize("prompt", [0, 1, 2])
def test_logits_that_are_not_finite_do_not_hold(value, damaged, prompt):
    """On any of the prompts, in any of the forms: an overflow in float16 must not pass for a small difference."""
    forms = {name: [torch.ones(2, 4) for _ in range(3)] for name in ("one", "other")}
    assert compare(Answers(forms["one"], []), Answers(forms["other"], []), torch.float16).holds
    for name in forms if damaged == "both" else [damaged]:
        forms[name][prompt][1, 2] = value
    agreement = compare(Answers(forms["one"], []), Answers(forms["other"], []), torch.float16)
    assert not agreement.holds
    assert not agreement.is_finite
