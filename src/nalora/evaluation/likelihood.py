"""The loss of the target answers: finer than accuracy, and defined for every task with targets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from nalora.control.tokens import IGNORED_LABEL
from nalora.evaluation.generation import batches_by_length
from nalora.models.loading import Loaded
from nalora.runs.encoding import Collator, Encoder
from nalora.tasks import Example


def target_losses(
    loaded: Loaded, examples: Sequence[Example], *, style: str = "plain", batch_tokens: int = 8_192
) -> list[tuple[float, int]]:
    """Return (−log p of the target given the prompt, its number of tokens) of each example.

    Each of the `batch_tokens` tokens of a batch, padding included, has a row of logits as wide as the vocabulary,
    together 2 GiB for Llama 3 in bfloat16.
    """
    encoder = Encoder(loaded.processor, loaded.spec.kind, style)
    rows = [encoder.row(example) for example in examples]
    collate = Collator(loaded.processor.pad_token_id)
    losses: dict[int, tuple[float, int]] = {}
    for batch in batches_by_length([len(row["input_ids"]) for row in rows], batch_tokens):
        losses |= dict(zip(batch, _losses(loaded, collate([rows[i] for i in batch])), strict=True))
    return [losses[i] for i in range(len(rows))]


def mean_loss(losses: Sequence[tuple[float, int]]) -> float:
    """Return the mean over tokens, as training reports it."""
    return sum(loss for loss, _ in losses) / sum(tokens for _, tokens in losses)


@torch.inference_mode()
def _losses(loaded: Loaded, batch: dict[str, Any]) -> list[tuple[float, int]]:
    inputs = {name: tensor.to(loaded.device) for name, tensor in batch.items()}
    labels = inputs["labels"]
    logits = loaded.model(**inputs).logits
    if loaded.spec.kind == "causal":
        logits, labels = logits[:, :-1], labels[:, 1:]
    # Row by row: the logits of a whole batch in float32 would be the largest tensor of all.
    losses = [
        torch.nn.functional.cross_entropy(row.float(), target, ignore_index=IGNORED_LABEL, reduction="sum")
        for row, target in zip(logits, labels, strict=True)
    ]
    tokens = (labels != IGNORED_LABEL).sum(1)
    return list(zip(torch.stack(losses).tolist(), tokens.tolist(), strict=True))
