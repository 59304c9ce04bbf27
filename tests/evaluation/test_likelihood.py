"""The loss of targets equals the model's own for any batch size."""

from __future__ import annotations

import pytest
import tiny
import torch

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
