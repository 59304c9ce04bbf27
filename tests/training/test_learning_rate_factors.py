"""Factors on learning rates, by parts of parameter names: with them a run trains modules whole next to adapters."""

from __future__ import annotations

import json

import peft
import pytest
import tiny
import transformers
from safetensors.torch import load_file

from nalora.errors import NALoRAError
from nalora.runs.folder import RunFolder
from nalora.runs.settings import check
from nalora.training.run import train


@pytest.fixture
def settings(tmp_path):
    return {
        "model": tiny.saved_llama(tmp_path / "base"), "task": "gym/chain_sum", "train_size": 24, "test_size": 8,
        "settings": {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}, "rank": 4,
        "output": str(tmp_path / "run"), "steps": 2, "batch_size": 4, "learning_rate": 1e-2, "device": "cpu",
        "warmup": 0.0, "log_every": 1, "max_length": 128,
    }  # fmt: skip


def saved(settings) -> dict:
    return load_file(RunFolder(settings["output"]).adapter / "adapter_model.safetensors")


@pytest.mark.parametrize(
    "whole", [["gate_proj"], ["q_proj", "k_proj", "v_proj", "o_proj"], ["norm", "layernorm"], ["embed_tokens"]]
)
def test_named_modules_are_trained_whole_at_their_own_rate_and_loaded_by_peft(settings, whole):
    """AdamW's first step moves a value by the learning rate, whatever its gradient is."""
    options = {"method": "peft/lora", "modules_to_save": whole, "ensure_weight_tying": "embed_tokens" in whole}
    train(check({**settings, **options, "steps": 1, "learning_rate_factors": {"modules_to_save": 0.05}}))
    base = transformers.AutoModelForCausalLM.from_pretrained(settings["model"])
    before = dict(base.named_parameters())
    tensors = saved(settings)
    trained = {name: tensor for name, tensor in tensors.items() if "lora_" not in name and "lm_head" not in name}
    assert {name.split(".")[-2] for name in trained} >= {module for module in whole if module.endswith("proj")}
    assert trained
    for name, tensor in trained.items():
        moved = (tensor - before[name.removeprefix("base_model.model.")]).abs().max().item()
        assert moved == pytest.approx(0.05 * 1e-2, rel=1e-3)
    b = [tensor.abs().max().item() for name, tensor in tensors.items() if "lora_B" in name]
    assert b == pytest.approx([1e-2] * len(b), rel=1e-3)
    if whole[0].endswith("proj"):
        assert not any(f"{whole[0]}.lora_" in name for name in tensors), "no adapter on a module that is trained whole"
    loaded = peft.PeftModel.from_pretrained(base, RunFolder(settings["output"]).adapter)
    state = dict(loaded.named_parameters())
    name, tensor = next(iter(trained.items()))
    place = ".modules_to_save.default.".join(name.rsplit(".", 1))
    assert (state[place] - tensor).abs().max() == 0


def test_the_logged_learning_rate_is_that_of_the_parameters_without_a_factor(settings):
    train(check({**settings, "schedule": "constant", "learning_rate_factors": {"lora_A": 0.25}}))
    rows = [json.loads(line) for line in RunFolder(settings["output"]).metrics.read_text().splitlines()]
    assert [row["learning_rate"] for row in rows] == [1e-2, 1e-2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"learning_rate_factors": {"gate_projection": 0.5}}, "no trained parameter"),
        ({"method": "lora+", "learning_rate_factors": {"lora_A": 0.5}}, "sets the learning rates"),
    ],
)
def test_factors_that_cannot_act_are_refused(settings, options, message):
    with pytest.raises(NALoRAError, match=message):
        train(check({**settings, **options}))


def test_a_factor_of_zero_is_refused_with_the_settings(settings):
    with pytest.raises(NALoRAError, match="learning_rate_factors"):
        check({**settings, "learning_rate_factors": {"lora_A": 0}})
