"""The loss of targets equals the model's own for any batch size."""

from __future__ import annotations

import pytest
import tiny
import torch

from nalora.evaluation import generation
from nalora.evaluation.generation import mean_loss, target_losses
from nalora.models.loading import ModelSpec, load
from nalora.tasks import Example


def test_batches_of_any_size_give_the_models_own_loss(tmp_path):
    loaded = load(ModelSpec(tiny.saved_llama(tmp_path), device="cpu"))
    examples = [Example(str(n), "question"[:n], "an answer"[: 9 - n]) for n in (1, 5, 3, 8)]
    together = target_losses(loaded, examples)
    assert [tokens for _, tokens in together] == [9, 5, 7, 2]
    for (loss, tokens), (alone, _), example in zip(
        together, target_losses(loaded, examples, batch_tokens=1), examples, strict=True
    ):
        prompt, target = (loaded.processor(text).input_ids for text in (example.prompt, example.target))
        ids = torch.tensor([[*prompt, *target, loaded.processor.eos_token_id]])
        labels = ids.clone()
        labels[0, : len(prompt)] = -100
        expected = loaded.model(input_ids=ids, labels=labels).loss.item()
        assert loss / tokens == pytest.approx(expected, rel=1e-5)
        assert alone == pytest.approx(loss, rel=1e-5)
    assert mean_loss(together) == pytest.approx(sum(loss for loss, _ in together) / 23)


def test_batches_and_groups_are_limited_by_the_logits(tmp_path, monkeypatch):
    """A batch has as many tokens as its logits leave room for; groups of rows change no loss."""
    loaded = load(ModelSpec(tiny.saved_llama(tmp_path), device="cpu"))
    examples = [Example(str(n), "question"[:n], "an answer"[: 9 - n]) for n in (1, 5, 3, 8)]
    expected, sizes = target_losses(loaded, examples), []
    forward = loaded.model.forward
    monkeypatch.setattr(
        loaded.model, "forward", lambda **inputs: (sizes.append(inputs["input_ids"].numel()), forward(**inputs))[1]
    )
    assert target_losses(loaded, examples) == expected
    assert len(sizes) == 1, "all four at once"
    a_row = 4 * loaded.model.config.vocab_size
    monkeypatch.setattr(generation, "_LOGITS_BYTES", 25 * a_row)
    monkeypatch.setattr(generation, "_FLOAT32_LOGITS", 1)
    sizes.clear()
    for (loss, tokens), (other, others) in zip(target_losses(loaded, examples), expected, strict=True):
        assert (loss, tokens) == (pytest.approx(other, rel=1e-5), others)
    assert len(sizes) > 1
    assert max(sizes) <= 25


def test_a_batch_of_an_encoder_decoder_is_limited_by_its_longer_side(tmp_path, monkeypatch):
    """Its logits are those of the target, which may be longer than the prompt."""
    loaded, sizes = load(ModelSpec(tiny.saved_t5(tmp_path), kind="seq2seq", device="cpu")), []
    forward = loaded.model.forward
    monkeypatch.setattr(
        loaded.model, "forward", lambda **inputs: (sizes.append(inputs["labels"].numel()), forward(**inputs))[1]
    )
    examples = [Example(str(n), "a", "a long answer") for n in range(6)]
    whole = target_losses(loaded, examples)
    parts = target_losses(loaded, examples, batch_tokens=30)
    assert sizes == [6 * 14, *3 * [2 * 14]]
    assert [loss for loss, _ in parts] == pytest.approx([loss for loss, _ in whole], rel=1e-5)


def test_rows_of_one_token_have_no_loss(tmp_path):
    """No token precedes it; as the only row of a batch, or next to longer ones."""
    loaded = load(ModelSpec(tiny.saved_llama(tmp_path), device="cpu"))
    empty, other = Example("1", "", ""), Example("2", "question", "answer")
    assert target_losses(loaded, [empty]) == [(0.0, 0)]
    assert target_losses(loaded, [empty, other], batch_tokens=1)[0] == (0.0, 0)


def test_a_decoder_does_not_compute_a_loss_of_its_own(tmp_path, monkeypatch):
    """It would cast the logits of the whole batch to float32."""
    loaded, outputs = load(ModelSpec(tiny.saved_llama(tmp_path), device="cpu")), []
    forward = loaded.model.forward
    monkeypatch.setattr(loaded.model, "forward", lambda **inputs: (outputs.append(forward(**inputs)), outputs[-1])[1])
    target_losses(loaded, [Example("1", "question", "answer")])
    assert [output.loss for output in outputs] == [None]


def test_a_config_that_does_not_name_the_size_of_the_vocabulary(tmp_path):
    loaded = load(ModelSpec(tiny.saved_llama(tmp_path), device="cpu"))
    examples = [Example("1", "question", "answer")]
    expected = target_losses(loaded, examples)
    del loaded.model.config.vocab_size
    assert target_losses(loaded, examples) == expected
