"""GGUF files in llama.cpp itself: the tokens of tricky texts and the logits are those of transformers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
from exported_models import ARCHITECTURES, TRICKY, byte_level, model_for, sentencepiece, tokenizer_for
from llama_cpp_environment import asked, interpreter
from tiny import with_lora

from nalora.methods.merging import PROMPTS, merge
from nalora.models import loading
from nalora.models.gguf_architectures import Architecture
from nalora.models.gguf_vocabulary import vocabulary_of
from nalora.models.gguf_writer import write_gguf

pytestmark = pytest.mark.slow
# The largest difference of two logits relative to the largest logit, for a file of float32.
TOLERANCE = 2e-5
# llama.cpp takes GELU from a table of float16 values.
GELU_TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def python() -> Path:
    return interpreter()


def written(path: Path, model, tokenizer, precision="f32") -> Path:
    vocabulary = vocabulary_of(tokenizer, model.get_input_embeddings().weight.shape[0])
    write_gguf(
        path, Architecture(model.config), vocabulary, model.state_dict(), precision=precision,
        chat_template=tokenizer.chat_template,
    )  # fmt: skip
    return path


def check_tokens(answers: dict, number: int, tokenizer, texts: list[str]) -> None:
    found = json.loads(str(answers[f"{number}.tokens"]))
    expected = [tokenizer(text).input_ids for text in texts]
    different = [(text, a, b) for text, a, b in zip(texts, found, expected, strict=True) if a != b]
    assert not different


@torch.no_grad()
def difference(answers: dict, number: int, model, ids: list[list[int]]) -> float:
    """The largest difference of logits, relative to the largest logit, over all lists of tokens."""
    largest = 0.0
    for index, tokens in enumerate(ids):
        expected = model(torch.tensor([tokens])).logits[0].float().numpy()
        found = answers[f"{number}.logits.{index}"]
        largest = max(largest, float(np.abs(found - expected).max() / np.abs(expected).max()))
    return largest


SCALED = {
    "llama3": dict(
        rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=64,
    ),
    "linear": dict(rope_type="linear", rope_theta=10000.0, factor=4.0),
    "yarn": dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=64),
}  # fmt: skip
PATTERN = ["sliding_attention", "full_attention"] * 2
GEMMA_ROPE = {
    "full_attention": dict(rope_type="linear", rope_theta=1e6, factor=8.0),
    "sliding_attention": dict(rope_type="default", rope_theta=5000.0),
}
VARIANTS = {
    **{name: (name, {}) for name in ARCHITECTURES},
    "llama with untied output": ("llama", dict(tie_word_embeddings=False)),
    "llama with tied output": ("llama", dict(tie_word_embeddings=True)),
    "llama with biases": ("llama", dict(attention_bias=True, mlp_bias=True)),
    "llama with wide heads": ("llama", dict(head_dim=32)),
    **{f"llama with {kind}": ("llama", dict(rope_parameters=rope)) for kind, rope in SCALED.items()},
    "qwen2 with yarn": ("qwen2", dict(rope_parameters=SCALED["yarn"])),
    "gemma3 with scaled positions": ("gemma3_text", dict(rope_parameters=GEMMA_ROPE)),
    "gemma3 with a pattern": ("gemma3_text", dict(layer_types=PATTERN, num_hidden_layers=4)),
    "gemma2 with 4 layers": ("gemma2", dict(num_hidden_layers=4)),
}  # fmt: skip


def test_every_architecture_computes_the_logits_of_transformers(python, tmp_path):
    requests, models = [], []
    for number, (architecture, settings) in enumerate(VARIANTS.values()):
        tokenizer = tokenizer_for(architecture)
        model = model_for(architecture, len(tokenizer) + 7, **settings)
        generator = torch.Generator().manual_seed(number)
        ids = [torch.randint(4, len(tokenizer), (n,), generator=generator).tolist() for n in (1, 9, 100)]
        file = written(tmp_path / f"{number}.gguf", model, tokenizer)
        texts = TRICKY if architecture == "llama" else [text for text in TRICKY if "\u0301" not in text]
        requests.append({"file": str(file), "texts": texts, "ids": ids})
        models.append((model, tokenizer))
    answers = asked(python, tmp_path, requests)
    found = {}
    for number, (name, request) in enumerate(zip(VARIANTS, requests, strict=True)):
        check_tokens(answers, number, models[number][1], request["texts"])
        found[name] = difference(answers, number, models[number][0], request["ids"])
    tolerances = {name: GELU_TOLERANCE if name.startswith("gemma") else TOLERANCE for name in VARIANTS}
    assert {name: value for name, value in found.items() if not value < tolerances[name]} == {}


TOKENIZERS = {
    **{f"bytes, {pre}": lambda pre=pre: byte_level(pre, bos=True) for pre in ("gpt-2", "smollm", "llama-bpe", "qwen2")},
    "bytes, smaug-bpe": lambda: byte_level("llama-bpe", ignore_merges=False),
    **{f"pieces, {form}": lambda form=form: sentencepiece(form) for form in ("gemma", "llama", "never")},
}


def test_every_kind_of_tokenizer_makes_the_same_tokens(python, tmp_path):
    requests, tokenizers = [], []
    for number, make in enumerate(TOKENIZERS.values()):
        tokenizer = make()
        model = model_for("llama", len(tokenizer), num_hidden_layers=1)
        file = written(tmp_path / f"{number}.gguf", model, tokenizer)
        requests.append({"file": str(file), "texts": TRICKY, "ids": []})
        tokenizers.append(tokenizer)
    answers = asked(python, tmp_path, requests)
    for number, tokenizer in enumerate(tokenizers):
        check_tokens(answers, number, tokenizer, TRICKY)


@pytest.mark.parametrize(("precision", "tolerance"), [("f16", 1e-2), ("bf16", 6e-2), ("q8_0", 0.25)])
def test_other_precisions_are_near(python, tmp_path, precision, tolerance):
    tokenizer = tokenizer_for("llama")
    model = model_for("llama", len(tokenizer))
    file = written(tmp_path / "model.gguf", model, tokenizer, precision)
    ids = [tokenizer(prompt).input_ids for prompt in PROMPTS]
    answers = asked(python, tmp_path, [{"file": str(file), "texts": TRICKY, "ids": ids}])
    found = difference(answers, 0, model, ids)
    assert TOLERANCE < found < tolerance


def test_a_real_model_with_a_merged_adapter(python, tmp_path):
    loaded = loading.load(loading.ModelSpec("smollm2-135m", dtype="float32", device="cpu"))
    adapted = with_lora(loaded.model, lora_b=0.01, r=8, lora_alpha=16).eval()
    ids = [loaded.processor(prompt).input_ids for prompt in PROMPTS]
    with torch.no_grad():
        changed = [adapted(torch.tensor([tokens])).logits[0].numpy() for tokens in ids]
        with adapted.disable_adapter():
            plain = [adapted(torch.tensor([tokens])).logits[0].numpy() for tokens in ids]
    assert max(np.abs(a - b).max() for a, b in zip(changed, plain, strict=True)) > 0.5
    merged = merge(adapted, torch.float32)
    assert not isinstance(merged, peft.PeftModel)
    file = written(tmp_path / "model.gguf", merged, loaded.processor)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    request = {"file": str(file), "texts": TRICKY, "ids": ids, "messages": messages}
    answers = asked(python, tmp_path, [request])
    check_tokens(answers, 0, loaded.processor, TRICKY)
    for index, expected in enumerate(changed):
        found = answers[f"0.logits.{index}"]
        assert np.abs(found - expected).max() < TOLERANCE * np.abs(expected).max()
    prompt = loaded.processor.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    made = merged.generate(**prompt, max_new_tokens=8, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert str(answers["0.chat"]) == loaded.processor.decode(made, skip_special_tokens=True)
