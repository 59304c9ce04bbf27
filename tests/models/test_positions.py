"""Texts beyond a model's table of positions are refused in one sentence, before training and before writing."""

from __future__ import annotations

import json

import pytest
import tiny
import torch
import transformers

import nalora
from nalora.evaluation.targets import Request, evaluate_target
from nalora.models.positions import position_limit
from nalora.runs.settings import check
from nalora.tasks.math import GSM8K
from nalora.training.run import train

PLACES = 32
HIDDEN = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=50)
NARROW = dict(n_layer=1, n_embd=16, n_head=2, n_positions=PLACES, vocab_size=50)
BOTH = dict(
    d_model=16, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=16, decoder_ffn_dim=16, encoder_attention_heads=2,
    decoder_attention_heads=2, max_position_embeddings=PLACES, vocab_size=50,
)  # fmt: skip
CONFIGS = {
    "gpt2": transformers.GPT2Config(**NARROW),
    "opt": transformers.OPTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, ffn_dim=16, vocab_size=50, word_embed_proj_dim=16,
        max_position_embeddings=PLACES,
    ),
    "gptj": transformers.GPTJConfig(**NARROW, rotary_dim=4),
    "mpt": transformers.MptConfig(n_layers=1, d_model=16, n_heads=2, max_seq_len=PLACES, vocab_size=50),
    "bigcode": transformers.GPTBigCodeConfig(**NARROW),
    "ctrl": transformers.CTRLConfig(**NARROW, dff=16),
    "biogpt": transformers.BioGptConfig(**HIDDEN, max_position_embeddings=PLACES),
    "roberta": transformers.RobertaConfig(**HIDDEN, max_position_embeddings=PLACES + 2, is_decoder=True),
    "llama": transformers.LlamaConfig(**HIDDEN, max_position_embeddings=PLACES),
    "neox": transformers.GPTNeoXConfig(**HIDDEN, max_position_embeddings=PLACES),
    "bloom": transformers.BloomConfig(n_layer=1, hidden_size=16, n_head=2, vocab_size=50),
    "bart": transformers.BartConfig(**BOTH),
    "pegasus": transformers.PegasusConfig(**BOTH),
    "t5": transformers.T5Config(d_model=16, num_layers=1, num_heads=2, d_ff=16, d_kv=8, vocab_size=50),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_the_limit_is_the_longest_text_that_the_model_reads(name):
    config = CONFIGS[name]
    auto = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    model = auto.from_config(config).eval()
    more = {"decoder_input_ids": torch.full((1, 3), 7)} if config.is_encoder_decoder else {}
    limit = position_limit(model)

    def read(length: int) -> None:
        with torch.no_grad():
            model(input_ids=torch.full((1, length), 7), **more)

    read(PLACES)
    if limit is None:
        read(PLACES + 8)
    else:
        assert limit == PLACES
        with pytest.raises((IndexError, RuntimeError)):
            read(PLACES + 1)


@pytest.fixture
def model(tmp_path) -> str:
    """A GPT-2 of 64 positions."""
    made = tiny.tokenizer()
    config = transformers.GPT2Config(
        n_layer=1, n_embd=16, n_head=2, n_positions=64, vocab_size=len(made), eos_token_id=1, bos_token_id=None
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "model")
    made.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def questions(folder, **lengths: int) -> str:
    folder.mkdir(exist_ok=True)
    for split, length in lengths.items():
        rows = [{"question": f"{split}{n}".ljust(length, "."), "answer": "So\n#### 2"} for n in range(4)]
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return str(folder)


def run_of(model, tmp_path, **changes):
    run = {"model": model, "task": "gsm8k", "device": "cpu", "output": str(tmp_path / "run"), "steps": 1}
    return check({**run, "batch_size": 2, **changes})


def test_a_row_beyond_the_positions_is_refused_before_training(model, tmp_path):
    data = questions(tmp_path / "data", train=80, test=8)
    with pytest.raises(nalora.NALoRAError, match=r"max_length: 1024: found a text of 97 tokens.* set max_length: 64"):
        train(run_of(model, tmp_path, data_dir=data))
    # What fits is trained on, whatever max_length would allow.
    questions(tmp_path / "data", train=20)
    assert train(run_of(model, tmp_path, data_dir=data))["examples"] == 4


def test_evaluation_refuses_what_is_too_long_and_writes_no_further_than_the_positions(model, tmp_path, monkeypatch):
    data = questions(tmp_path / "data", test=70)
    ask = dict(device="cpu", output=tmp_path / "out")
    with pytest.raises(nalora.NALoRAError, match=r"task 'gsm8k': found a text of \d+ tokens; expected at most 64"):
        evaluate_target(model, Request(task="gsm8k", data_dir=data), **ask)
    questions(tmp_path / "data", test=20)
    monkeypatch.setattr(GSM8K, "max_new_tokens", 512)
    summary = evaluate_target(model, Request(task="gsm8k", data_dir=data), **ask)["model"]
    assert summary["tokens"] <= 4 * (64 - 27)
    assert summary["target_loss"]["value"] > 0
