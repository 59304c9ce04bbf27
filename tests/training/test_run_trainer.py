"""Which models divide their loss by the step's tokens themselves, and what a pass contributes where they do not."""

from __future__ import annotations

import peft
import pytest
import tiny
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tasks.test_clip import classifier
from torch import nn

from nalora.control.tokens import IGNORED_LABEL
from nalora.runs.settings import check
from nalora.training.run import train
from nalora.training.run_trainer import RunTrainer, divides_by_items, share_of_step

SMALL = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=30)


def t5gemma():
    part = SMALL | dict(num_key_value_heads=1, head_dim=8, sliding_window=8, layer_types=["full_attention"])
    config = transformers.T5GemmaConfig(encoder=part, decoder=part | dict(cross_attention_hidden_size=16))
    return transformers.T5GemmaForConditionalGeneration(config)


def t5():
    config = transformers.T5Config(vocab_size=30, d_model=16, d_ff=32, d_kv=8, num_layers=1, num_heads=2,
                                   decoder_start_token_id=0, pad_token_id=0)  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def bart():
    config = transformers.BartConfig(
        vocab_size=30, d_model=16, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=32, decoder_ffn_dim=32,
        encoder_attention_heads=2, decoder_attention_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    return transformers.BartForConditionalGeneration(config)


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))


@pytest.mark.parametrize(("make", "divides"), [(llama, True), (t5gemma, True), (t5, False), (bart, False)])
def test_what_is_read_of_a_model_is_what_it_does(make, divides):
    torch.manual_seed(0)
    model = make().eval()
    ids = torch.randint(3, 30, (2, 6))
    plain = model(input_ids=ids, labels=ids).loss.item()
    with_items = model(input_ids=ids, labels=ids, num_items_in_batch=1000).loss.item()
    assert (abs(with_items - plain) > 0.5 * plain) == divides
    assert divides_by_items(model) == divides


def test_models_of_other_kinds():
    assert divides_by_items(classifier())
    assert not divides_by_items(nn.Linear(2, 2))
    assert not divides_by_items(peft.get_peft_model(t5(), peft.LoraConfig(target_modules=["q"])).get_base_model())


@given(st.lists(st.lists(st.integers(-1, 4), min_size=1, max_size=6), min_size=1, max_size=5), st.integers(0, 9))
def test_the_shares_of_passes_add_up_to_the_mean_of_all(passes, seed):
    generator = torch.Generator().manual_seed(seed)
    passes = [torch.tensor([IGNORED_LABEL if label < 0 else label for label in row]) for row in passes]
    logits = [torch.randn(len(row), 5, generator=generator, dtype=torch.float64) for row in passes]
    items = sum(int((row != IGNORED_LABEL).sum()) for row in passes)
    if not items:
        return
    for each in logits:
        each.requires_grad_()
    shares = [
        share_of_step(nn.functional.cross_entropy(each, row), row, torch.tensor(items))
        for each, row in zip(logits, passes, strict=True)
    ]
    sum(shares).backward()
    found = torch.cat([each.grad for each in logits])
    joined = torch.cat([each.detach() for each in logits]).requires_grad_()
    expected = nn.functional.cross_entropy(joined, torch.cat(passes))
    expected.backward()
    torch.testing.assert_close(sum(shares), expected)
    torch.testing.assert_close(found, joined.grad)


@pytest.mark.parametrize("micro", [4, 2])
def test_the_loss_is_the_mean_over_predicted_labels_where_every_token_has_one(tmp_path, micro):
    """Nothing predicts the first token of a row, which Trainer counted before transformers 5.10."""
    model, ids = llama(), torch.randint(3, 30, (4, 6))
    expected = model(input_ids=ids, labels=ids).loss.item()
    arguments = transformers.TrainingArguments(
        str(tmp_path), per_device_train_batch_size=micro, gradient_accumulation_steps=4 // micro, max_steps=1,
        logging_steps=1, learning_rate=0.0, use_cpu=True, report_to="none", disable_tqdm=True,
    )  # fmt: skip
    trainer = RunTrainer(model=model, args=arguments, train_dataset=[{"input_ids": row, "labels": row} for row in ids])
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("method", [{"method": "lora"}, {"method": "adalora"}, {"method": "na-lora"}])
def test_an_encoder_decoder_is_the_same_in_any_passes(tmp_path, method):
    """Under SGD, which shows a factor of the gradient; logged loss, gradient norm and the adapter."""
    settings = {
        "model": tiny.saved_t5(tmp_path / "t5", dropout_rate=0.0), "task": "gym/chain_sum", "train_size": 11,
        "test_size": 2, "settings": {"min_terms": 2, "max_terms": 4, "min_digits": 1, "max_digits": 5}, "device": "cpu",
        "steps": 4, "batch_size": 8, "learning_rate": 0.3, "optimizer": "sgd", "log_every": 1, "rank": 3, **method,
    }  # fmt: skip
    from launched import difference, logged, weights

    for micro in (8, 2):
        train(check({**settings, "micro_batch_size": micro, "output": str(tmp_path / str(micro))}))
    for name in ("loss", "grad_norm"):
        assert logged(tmp_path / "2", name) == pytest.approx(logged(tmp_path / "8", name), rel=1e-5)
    assert difference(weights(tmp_path / "8"), weights(tmp_path / "2")) < 1e-5
