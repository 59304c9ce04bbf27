"""Answers to many prompts, and the loss of target answers, in padded batches of similar length.

Prompts of a decoder are padded on the left, since it continues at their end. Prompts of an encoder are padded on the
right, as in training: with absolute positions, padding on the left would shift every token.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nalora.control.tokens import IGNORED_LABEL
from nalora.evaluation.static_generation import generate_greedily
from nalora.models.attention import is_plain_decoder
from nalora.models.loading import Loaded
from nalora.models.positions import check_length, position_limit
from nalora.runs.encoding import Collator, Encoder
from nalora.tasks import Answer, Example

# The number of last tokens searched for a stop text: more than are generated between two checks, plus the longest text.
_STOP_WINDOW = 48
# Of a batch whose losses are computed: the bytes of its logits, the most tokens, and the logits cast at a time.
_LOGITS_BYTES, _MOST_TOKENS, _FLOAT32_LOGITS = 2**31, 32_768, 2**27


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen: greedily at temperature 0, else by `temperature` and `top_p`, reproducibly by `seed`."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def options(self) -> dict[str, Any]:
        """Return the arguments of `generate`, which replace those of the model's generation config."""
        if not self.temperature:
            return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        return {"do_sample": True, "temperature": self.temperature, "top_p": self.top_p, "top_k": 0}


def batches_by_length(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Return batches of at most `batch_tokens` tokens, padding included, as indices into the rows' `lengths`.

    The longest rows come first, so that the peak memory is reached early; a row that is too long is a batch by itself.
    """
    waiting = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    batches = []
    while waiting:
        size = max(1, batch_tokens // lengths[waiting[0]])
        batches.append(waiting[:size])
        waiting = waiting[size:]
    return batches


class AnswerGenerator:
    """Generates the answers of one model.

    Args:
        model: in evaluation mode.
        encoder: makes the same tokens of a question as in training.
        max_new_tokens: the maximum for each turn.
        stop: texts that end an answer; the answer is cut before them.
        batch_tokens: the maximum of one batch, counting prompts and max_new_tokens.
        sampling: how tokens are chosen; greedily by default.
    """

    def __init__(
        self,
        model: nn.Module,
        encoder: Encoder,
        *,
        max_new_tokens: int,
        stop: Sequence[str] = (),
        batch_tokens: int = 32_768,
        sampling: Sampling | None = None,
    ) -> None:
        self.model: Any = model
        self.sampling = sampling or Sampling()
        self.encoder, self.max_new_tokens, self.batch_tokens = encoder, max_new_tokens, batch_tokens
        self.stop = (*stop, *encoder.end_texts)
        self.limit = position_limit(model)
        self.device = next(model.parameters()).device
        self.causal = encoder.kind == "causal"
        # On a CPU a cache of fixed size only costs time: every step reads all of it.
        self.static = self.device.type == "cuda" and self.causal and is_plain_decoder(model)
        self.static &= not self.sampling.temperature

    def batches(self, examples: Sequence[Example]) -> list[list[Example]]:
        """Return batches of examples of similar length; the same examples always give the same batches."""
        prompts = [len(self.encoder.prompt(self.encoder.opening(example))) for example in examples]
        self._check_length(max(prompts, default=0))
        lengths = [prompt + self.max_new_tokens for prompt in prompts]
        return [[examples[i] for i in batch] for batch in batches_by_length(lengths, self.batch_tokens)]

    def answer(self, batch: Sequence[Example]) -> list[Answer]:
        """Return the answers to one batch, with all turns of its conversations."""
        conversations = [self.encoder.opening(example) for example in batch]
        outputs: list[list[str]] = [[] for _ in batch]
        tokens, finished = [0] * len(batch), [True] * len(batch)
        for turn in range(1 + max(len(example.follow_ups) for example in batch)):
            active = [i for i, example in enumerate(batch) if turn <= len(example.follow_ups)]
            if turn:
                for i in active:
                    further = self.encoder.follow_up(batch[i], turn - 1)
                    conversations[i] += [
                        {"role": "assistant", "content": outputs[i][-1]},
                        {"role": "user", "content": further},
                    ]
            texts = self.generate([self.encoder.prompt(conversations[i]) for i in active])
            for i, (text, count, ended) in zip(active, texts, strict=True):
                outputs[i].append(text)
                tokens[i] += count
                finished[i] &= ended
        return [Answer(*fields) for fields in zip(batch, outputs, tokens, finished, strict=True)]

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], streamer: Any = None) -> list[tuple[str, int, bool]]:
        """Return (text, number of tokens, whether it ended before the token limit) for each prompt.

        A `streamer`, for one prompt, gets the tokens as they are generated (transformers' interface: `put`, `end`).
        """
        tokenizer = self.encoder.tokenizer
        longest = max(map(len, prompts))
        self._check_length(longest)
        ids = self._padded(prompts, tokenizer.pad_token_id, longest)
        mask = self._padded([[1] * len(prompt) for prompt in prompts], 0, longest)
        max_new_tokens = self.max_new_tokens
        if self.limit is not None:
            # A decoder's positions continue after the prompt, those of an encoder-decoder after its start token.
            max_new_tokens = min(max_new_tokens, self.limit - (longest if self.causal else 1))
        if self.static and streamer is None:
            rows = generate_greedily(
                self.model,
                ids,
                mask,
                max_new_tokens=max_new_tokens,
                ends=self._ends(),
                pad=tokenizer.pad_token_id,
                stops=lambda row: self._has_stop(row[-_STOP_WINDOW:]),
            )
            return [self.read(row) for row in rows]
        stops: dict[str, Any] = {"stop_strings": list(self.stop), "tokenizer": tokenizer} if self.stop else {}
        generated = self.model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=max_new_tokens,
            num_beams=1,
            streamer=streamer,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=self._ends(),
            **self.sampling.options(),
            **stops,
        )
        # After the prompt, or after the decoder's start token.
        return [self.read(row) for row in generated[:, longest if self.causal else 1 :].tolist()]

    def _check_length(self, longest: int) -> None:
        fix = "use a model with more than {limit} positions"
        check_length(self.model, longest + (1 if self.causal else 0), "the longest question", fix)

    def _padded(self, rows: list[list[int]], value: int, length: int) -> torch.Tensor:
        pads = [[value] * (length - len(row)) for row in rows]
        padded = [pad + row if self.causal else row + pad for row, pad in zip(rows, pads, strict=True)]
        return torch.tensor(padded, device=self.device)

    def _has_stop(self, row: list[int]) -> bool:
        text = self._decoded(row) if self.stop else ""
        return any(stop in text for stop in self.stop)

    def _decoded(self, row: list[int]) -> str:
        text: str = self.encoder.tokenizer.decode(row, skip_special_tokens=True)
        return text

    def _ends(self) -> list[int]:
        """Return the tokens that end an answer: the encoder's, and those of the model's generation config."""
        own = getattr(self.model.generation_config, "eos_token_id", None)
        own = own if isinstance(own, list) else [own]
        return list(dict.fromkeys(e for e in (*self.encoder.end_tokens, *own) if e is not None))

    def read(self, row: list[int]) -> tuple[str, int, bool]:
        """Return (text, number of tokens, whether it ended) of generated tokens, up to the first end or stop text."""
        ends = set(self._ends())
        count = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
        if not self._has_stop(row[:count]):
            return self._decoded(row[:count]), count, any(token in ends for token in row)
        # Padding follows where the batch continued, and more text where stops were not checked after every token.
        count = 1 + bisect_left(range(count), True, key=lambda last: self._has_stop(row[: last + 1]))
        text = self._decoded(row[:count])
        return text[: min(at for stop in self.stop if (at := text.find(stop)) >= 0)], count, True


def target_losses(
    loaded: Loaded, examples: Sequence[Example], *, style: str = "plain", batch_tokens: int | None = None
) -> list[tuple[float, int]]:
    """Return (−log p of the target given the prompt, its number of tokens) of each example: finer than accuracy.

    Each of the `batch_tokens` tokens of a batch, padding included, has a row of logits as wide as the vocabulary. By
    default a batch has as many as fit into 2 GiB, 8,372 with Llama 3 in bfloat16, and at most 32,768.
    """
    encoder = Encoder(loaded.processor, loaded.spec.kind, style)
    rows = [encoder.row(example) for example in examples]
    collate = Collator(loaded.processor.pad_token_id)
    losses: dict[int, tuple[float, int]] = {}
    lengths = [max(map(len, row.values())) for row in rows]  # of an encoder-decoder, the longer of its two sides
    for batch in batches_by_length(lengths, batch_tokens or _batch_tokens(loaded)):
        losses |= dict(zip(batch, _losses(loaded, collate([rows[i] for i in batch])), strict=True))
    return [losses[i] for i in range(len(rows))]


def _batch_tokens(loaded: Loaded) -> int:
    config: Any = loaded.model.config
    # The config of a model with code of its own may name it otherwise.
    vocabulary = getattr(config.get_text_config(decoder=True), "vocab_size", None) or len(loaded.processor)
    row = vocabulary * next(loaded.model.parameters()).element_size()
    return int(min(_MOST_TOKENS, _LOGITS_BYTES // row))


def mean_loss(losses: Sequence[tuple[float, int]]) -> float:
    """Return the mean over tokens, as training reports it."""
    return sum(loss for loss, _ in losses) / sum(tokens for _, tokens in losses)


@torch.inference_mode()
def _losses(loaded: Loaded, batch: dict[str, Any]) -> list[tuple[float, int]]:
    inputs = {name: tensor.to(loaded.device) for name, tensor in batch.items()}
    labels = inputs["labels"]
    if loaded.spec.kind == "causal":
        del inputs["labels"]  # with which the model would compute its own loss, of all logits in float32
    logits = loaded.model(**inputs).logits
    if loaded.spec.kind == "causal":
        logits, labels = logits[:, :-1], labels[:, 1:]
    # In groups of rows: the logits of a whole batch in float32 would be the largest tensor of all.
    group = max(1, _FLOAT32_LOGITS // max(1, logits[0].numel()))
    losses = torch.cat([
        torch.nn.functional.cross_entropy(
            part.flatten(0, 1).float(), target.flatten(), ignore_index=IGNORED_LABEL, reduction="none"
        ).view_as(target).sum(1)
        for part, target in zip(logits.split(group), labels.split(group), strict=True)
    ])  # fmt: skip
    tokens = (labels != IGNORED_LABEL).sum(1)
    return list(zip(losses.tolist(), tokens.tolist(), strict=True))
