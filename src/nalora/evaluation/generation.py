"""Greedy answers to many prompts: long ones together, short ones together, padded and masked.

A decoder's prompts are padded on the left, for it goes on at their end. An encoder's are padded on the right, as in
training: where positions are absolute, pads on the left would move every token.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from nalora.evaluation.batches import of_like_length
from nalora.evaluation.static_generation import write_greedily
from nalora.models.attention import is_plain_decoder
from nalora.models.positions import check_length, position_limit
from nalora.runs.encoding import Encoder
from nalora.tasks import Answer, Example

# Tokens in which a stopping text is looked for: more than are written between two looks and the longest text together.
_LATELY = 48


class Writer:
    """Writes the answers of one model.

    Args:
        model: in evaluation mode.
        encoder: gives the very tokens that training saw.
        max_new_tokens: for each turn.
        stop: texts at which writing ends; what follows is cut off.
        batch_tokens: prompts and room for answers of one batch, together.
    """

    def __init__(
        self,
        model: nn.Module,
        encoder: Encoder,
        *,
        max_new_tokens: int,
        stop: Sequence[str] = (),
        batch_tokens: int = 32_768,
    ) -> None:
        self.model: Any = model
        self.encoder, self.max_new_tokens, self.batch_tokens = encoder, max_new_tokens, batch_tokens
        self.stop = (*stop, *encoder.end_texts)
        self.limit = position_limit(model)
        self.device = next(model.parameters()).device
        # On a CPU a cache of fixed size only costs: every step reads all of it.
        self.static = self.device.type == "cuda" and encoder.kind == "causal" and is_plain_decoder(model)

    def batches(self, examples: Sequence[Example]) -> list[list[Example]]:
        """Examples of like length together; the same batches for the same examples."""
        prompts = [len(self.encoder.prompt([self.encoder.question(each)])) for each in examples]
        self._refuse_longer(max(prompts, default=0))
        lengths = [prompt + self.max_new_tokens for prompt in prompts]
        return [[examples[i] for i in batch] for batch in of_like_length(lengths, self.batch_tokens)]

    def answer(self, batch: Sequence[Example]) -> list[Answer]:
        """The answers to one batch."""
        conversations = [[self.encoder.question(each)] for each in batch]
        outputs: list[list[str]] = [[] for _ in batch]
        tokens, finished = [0] * len(batch), [True] * len(batch)
        for turn in range(1 + max(len(each.follow_ups) for each in batch)):
            asked = [i for i, each in enumerate(batch) if turn <= len(each.follow_ups)]
            if turn:
                for i in asked:
                    conversations[i] += [outputs[i][-1], self.encoder.follow_up(batch[i], turn - 1)]
            texts = self._generate([self.encoder.prompt(conversations[i]) for i in asked])
            for i, (text, count, ended) in zip(asked, texts, strict=True):
                outputs[i].append(text)
                tokens[i] += count
                finished[i] &= ended
        return [Answer(*each) for each in zip(batch, outputs, tokens, finished, strict=True)]

    @torch.inference_mode()
    def _generate(self, prompts: list[list[int]]) -> list[tuple[str, int, bool]]:
        """(text, tokens written, whether it came to an end) of each prompt."""
        tokenizer = self.encoder.tokenizer
        longest = max(map(len, prompts))
        self._refuse_longer(longest)
        ids = [self._padded(prompt, tokenizer.pad_token_id, longest) for prompt in prompts]
        mask = [self._padded([1] * len(prompt), 0, longest) for prompt in prompts]
        if self.static:
            rows = write_greedily(
                self.model,
                torch.tensor(ids, device=self.device),
                torch.tensor(mask, device=self.device),
                max_new_tokens=self._room(longest),
                ends=self._ends(),
                pad=tokenizer.pad_token_id,
                stops=self._stops,
            )
            return [self._read(row) for row in rows]
        options: dict[str, Any] = {"stop_strings": list(self.stop), "tokenizer": tokenizer} if self.stop else {}
        written = self.model.generate(
            input_ids=torch.tensor(ids, device=self.device),
            attention_mask=torch.tensor(mask, device=self.device),
            max_new_tokens=self._room(longest),
            do_sample=False,
            num_beams=1,
            temperature=None,
            top_p=None,
            top_k=None,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=self._ends(),
            **options,
        )
        if self.encoder.kind == "causal":
            written = written[:, longest:]
        return [self._read(row) for row in written.tolist()]

    def _room(self, longest: int) -> int:
        """Tokens that may be written after a prompt of this length: fewer where the model's positions end."""
        if self.limit is None:
            return self.max_new_tokens
        # A decoder goes on behind its prompt; the one beside an encoder behind its start token.
        return min(self.max_new_tokens, self.limit - (longest if self.encoder.kind == "causal" else 1))

    def _refuse_longer(self, longest: int) -> None:
        room = 1 if self.encoder.kind == "causal" else 0
        check_length(self.model, longest + room, "the longest question", "use a model with more than {limit} positions")

    def _padded(self, row: list[int], value: int, length: int) -> list[int]:
        pads = [value] * (length - len(row))
        return row + pads if self.encoder.kind == "seq2seq" else pads + row

    def _stops(self, row: list[int]) -> bool:
        """Whether what was written lately holds a text at which writing ends."""
        return bool(self.stop) and self._holds_a_stop(row[-_LATELY:])

    def _holds_a_stop(self, row: list[int]) -> bool:
        text = self._decoded(row)
        return any(stop in text for stop in self.stop)

    def _decoded(self, row: list[int]) -> str:
        text: str = self.encoder.tokenizer.decode(row, skip_special_tokens=True)
        return text

    def _ends(self) -> list[int]:
        """The tokens that end an answer: the encoder's, and those the model was released with."""
        own = getattr(self.model.generation_config, "eos_token_id", None)
        own = own if isinstance(own, list) else [own]
        return list(dict.fromkeys(e for e in (*self.encoder.end_tokens, *own) if e is not None))

    def _read(self, row: list[int]) -> tuple[str, int, bool]:
        """(text, tokens, whether it came to an end) of what one row holds, up to its first end or stopping text."""
        ends = set(self._ends())
        written = row[1:] if self.encoder.kind == "seq2seq" else row  # without a decoder's start token
        count = next((i + 1 for i, token in enumerate(written) if token in ends), len(written))
        if not self._holds_a_stop(written[:count]):
            return self._decoded(written[:count]), count, any(token in ends for token in written)
        # Pads follow where a batch went on, and more text where a stop was not looked for after every token.
        count = 1 + bisect_left(range(count), True, key=lambda last: self._holds_a_stop(written[: last + 1]))
        text = self._decoded(written[:count])
        return text[: min(at for stop in self.stop if (at := text.find(stop)) >= 0)], count, True
