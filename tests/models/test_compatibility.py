"""Models, devices and attention implementations that cannot be used are refused before weights are loaded."""

from __future__ import annotations

import importlib.util

import pytest
import tiny
import torch
import transformers

import nalora
from nalora.evaluation.targets import Request, evaluate_target
from nalora.models.compatibility import check_attention, default_dtype, is_encoder_only, resolve_device
from nalora.models.loading import ModelSpec, load
from nalora.runs.settings import check
from nalora.training.run import train

SMALL = dict(vocab_size=99, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)


def saved(folder, config) -> str:
    transformers.AutoModel.from_config(config).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def no_weights(monkeypatch):
    for name in ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM"):
        monkeypatch.setattr(getattr(transformers, name), "from_pretrained", lambda *_, **__: pytest.fail("loaded"))


@pytest.mark.parametrize("config", [transformers.BertConfig, transformers.RobertaConfig, transformers.MPNetConfig])
@pytest.mark.parametrize("task", ["gym/chain_sum", "sst2"])
def test_an_encoder_is_refused_in_training_and_evaluation(tmp_path, no_weights, config, task):
    model = saved(tmp_path / "model", config(**SMALL))
    data = {"data_dir": tiny.saved_sst2(tmp_path)} if task == "sst2" else {}
    run = check({"model": model, "task": task, "output": str(tmp_path / "run"), "device": "cpu", **data})
    for use in (lambda: train(run), lambda: evaluate_target(model, Request(task=task, **data), device="cpu")):
        with pytest.raises(nalora.NALoRAError, match="an encoder without a decoder") as raised:
            use()
        assert "\n" not in str(raised.value)


def test_an_encoder_decoder_is_refused_where_a_decoder_is_needed(tmp_path, no_weights):
    with pytest.raises(nalora.NALoRAError, match="t5, an encoder-decoder"):
        load(ModelSpec(tiny.saved_t5(tmp_path), "causal", device="cpu"))


def test_decoders_are_no_encoders():
    for config in (transformers.LlamaConfig(), transformers.GPT2Config(), transformers.BertConfig(is_decoder=True)):
        assert not is_encoder_only(config)
    assert not is_encoder_only(transformers.BartConfig())
    assert is_encoder_only(transformers.BertConfig())


def test_flash_attention_on_a_cpu_is_refused_before_the_model_is_read(tmp_path):
    """Installing the package would not help there, so that is not the advice."""
    with pytest.raises(nalora.NALoRAError, match="attention: flash_attention_2: found the device cpu") as raised:
        load(ModelSpec("no/such-model", device="cpu", attention="flash_attention_2"))
    assert "\n" not in str(raised.value)
    assert raised.value.fix == "set attention to sdpa, or leave it out"
    folder = tiny.saved_llama(tmp_path)
    for attention in ("sdpa", None):
        assert load(ModelSpec(folder, device="cpu", attention=attention)).model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("name", "package"), [("flash_attention_2", "flash_attn"), ("flash_attention_3", "flash_attn_interface")]
)
def test_a_missing_package_is_named(monkeypatch, name, package):
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    with pytest.raises(nalora.NALoRAError, match=f"no package {package}.*set attention to sdpa"):
        check_attention(name, "cuda:0")
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: object() if module == package else None)
    check_attention(name, "cuda:0")


def test_a_misspelt_name_is_answered_with_a_suggestion():
    with pytest.raises(nalora.NALoRAError, match=r"did you mean flash_attention_2\?"):
        load(ModelSpec("no/such-model", device="cpu", attention="flash_attn_2"))


@pytest.mark.parametrize(
    "name", [None, "sdpa", "eager", "flex_attention", "kernels-community/flash-attn2", "paged|eager"]
)
def test_other_implementations_are_left_to_transformers(name):
    check_attention(name, "cpu")


def test_dtype_follows_the_device():
    assert default_dtype("cpu") == "float32"


def test_a_device_that_is_not_here(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert resolve_device("cuda:0") == "cuda:0"
    assert resolve_device("cpu") == "cpu"
    with pytest.raises(nalora.NALoRAError, match="found 1 cuda device here"):
        resolve_device("cuda:1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(nalora.NALoRAError, match="found no cuda device here"):
        load(ModelSpec(str(tmp_path), device="cuda"))
    with pytest.raises(nalora.NALoRAError, match="no device of that name"):
        resolve_device("gpu")
