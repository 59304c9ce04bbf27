"""Models are loaded by name, folder or hub id; errors name what is missing and its fix."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import sys
from pathlib import Path

import pytest
import tiny
import torch
import transformers

import nalora
from nalora.control.inspection import inspect_model
from nalora.models import loading
from nalora.models.loading import ModelSpec, load, load_processor, load_skeleton, model_kind


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.saved_llama(tmp_path_factory.mktemp("model"))


def test_a_folder(folder):
    loaded = load(ModelSpec(folder, dtype="bfloat16", device="cpu", attention="eager"))
    assert next(loaded.model.parameters()).dtype == torch.bfloat16
    assert loaded.model.config._attn_implementation == "eager"
    assert not loaded.model.training
    assert loaded.processor.pad_token_id is not None


def test_a_tokenizer_without_a_pad_gets_one(folder, tmp_path):
    tokenizer = tiny.tokenizer()
    tokenizer.pad_token = None
    transformers.AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert load(ModelSpec(str(tmp_path), device="cpu")).processor.pad_token == "</s>"


def test_an_encoder_decoder(tmp_path):
    config = transformers.T5Config(
        vocab_size=99, d_model=16, d_ff=32, d_kv=8, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    assert load(ModelSpec(str(tmp_path), "seq2seq", device="cpu")).model.config.is_encoder_decoder


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nobody/nothing-here", "smollm2-135m, which needs no network"),
        ("nobody/nothing-here", "no folder of that name and, from the hub, OSError"),
        ("no/such/file.gguf", "no such file"),
    ],
)
def test_what_is_not_there(name, words):
    with pytest.raises(nalora.NALoRAError, match=words):
        load(ModelSpec(name, device="cpu"))


@pytest.mark.parametrize("name", ["./mm", "../mm", "models/mm", "a/b/c", "/no/such/model", "~/no-such-model"])
def test_a_path_that_does_not_exist_is_no_hub_id(name, tmp_path, monkeypatch):
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(nalora.NALoRAError, match="no such folder") as raised:
        load(ModelSpec(name, device="cpu"))
    assert "network" not in str(raised.value)


def test_a_folder_that_is_no_model(tmp_path):
    with pytest.raises(nalora.NALoRAError, match=r"without config\.json"):
        load(ModelSpec(str(tmp_path), device="cpu"))


def with_config(**values):
    def change(folder):
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return change


def with_pickle(content):
    def change(folder):
        (folder / "model.safetensors").unlink()
        if isinstance(content, bytes):
            (folder / "pytorch_model.bin").write_bytes(content)
        else:
            torch.save(content, folder / "pytorch_model.bin")

    return change


DAMAGED = {
    "pickle": (with_pickle({"path": Path()}), "a pickle that torch refuses"),
    "no pickle": (with_pickle(b"junk"), "unpack requires"),
    "vocabulary": (with_config(vocab_size=7), r"weights of other shapes than its config\.json describes"),
    "type": (with_config(hidden_size="x"), "'hidden_size' expected int, got str"),
    "zero": (with_config(num_attention_heads=0), "ZeroDivisionError"),
    "activation": (with_config(hidden_act="nothing"), "KeyError: 'nothing'"),
    "tokenizer": (lambda folder: (folder / "tokenizer.json").write_text('{"a": 3}'), "KeyError: 'added_tokens'"),
    "list": (lambda folder: (folder / "config.json").write_text("[1]"), "Should have a `model_type` key"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_folder_is_one_sentence(folder, tmp_path, name):
    damage, found = DAMAGED[name]
    shutil.copytree(folder, tmp_path / "model")
    damage(tmp_path / "model")
    spec = ModelSpec(str(tmp_path / "model"), device="cpu")
    with pytest.raises(nalora.NALoRAError, match=rf"{found}.*expected a causal model that transformers can load"):
        load(spec)
    for other in (load_skeleton, load_processor, model_kind):
        with contextlib.suppress(nalora.NALoRAError):
            other(spec)


@pytest.mark.parametrize("raised", [TypeError("a mistake"), torch.OutOfMemoryError("no memory")])
def test_an_error_that_is_no_fault_of_the_model_stays(folder, monkeypatch, raised):
    code = "def processor(spec, source, extra):\n    raise error"
    names = {"__name__": loading.__name__, "error": raised}
    exec(code, names)
    monkeypatch.setattr(loading, "_processor", names["processor"])
    with pytest.raises(type(raised), match=str(raised)):
        load(ModelSpec(folder, device="cpu"))


def test_code_from_the_hub_runs_only_if_the_user_allows_it(folder, monkeypatch):
    options_given = {}

    def from_pretrained(source, **options):
        options_given.update(options)
        raise ValueError("set trust_remote_code=True to run it")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", from_pretrained)
    with pytest.raises(nalora.NALoRAError, match="if you trust it add --trust"):
        load(ModelSpec(folder, device="cpu"))
    assert options_given["trust_remote_code"] is False
    with pytest.raises(nalora.NALoRAError):
        load(ModelSpec(folder, device="cpu", trust_remote_code=True))
    assert options_given["trust_remote_code"] is True


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
@pytest.mark.parametrize("kernel", ["owner/kernel", "owner/kernel@main:function", "paged|owner/kernel", {"": "a/b"}])
def test_a_kernel_that_the_model_names_runs_only_if_the_user_allows_it(folder, tmp_path, monkeypatch, key, kernel):
    shutil.copytree(folder, tmp_path / "model")
    with_config(**{key: kernel})(tmp_path / "model")
    spec, reached = ModelSpec(str(tmp_path / "model"), device="cpu"), []
    # The kernels package is not needed to see whether transformers would ask for it.
    monkeypatch.setattr(
        transformers.PreTrainedModel, "_check_and_adjust_attn_implementation", lambda *given, **_: reached.append(given)
    )
    for start in (load, load_skeleton, lambda spec: inspect_model(spec.name)):
        with pytest.raises(nalora.NALoRAError, match=r"a kernel from the hub whose code would run.*add --trust"):
            start(spec)
    assert not reached
    with contextlib.suppress(nalora.NALoRAError):
        load(dataclasses.replace(spec, trust_remote_code=True))
    assert reached


def test_quantisation_names_the_package_it_needs(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(nalora.NALoRAError, match="pip install bitsandbytes"):
        load(ModelSpec(folder, device="cpu", quantise="4bit"))


def test_the_named_model():
    loaded = load(ModelSpec("smollm2-135m", device="cpu"))
    assert loaded.model.config.num_hidden_layers == 30
    assert loaded.processor.chat_template
