"""Examples as rows of tokens: the loss sees targets alone, and what does not fit is counted."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from nalora.control.tokens import IGNORED_LABEL
from nalora.errors import NALoRAError, counted
from nalora.runs.chat_template import ChatTemplate
from nalora.tasks import Example

Row = dict[str, list[int]]


@dataclass(frozen=True)
class Encoder:
    """Turns examples into tokens.

    In plain style prompt and target are tokenised apart and joined, so that no token holds a piece of both: a prompt's
    tokens are never trained on, and generation starts from exactly the tokens that training saw. In chat style a
    decoder's row is what the tokenizer's `apply_chat_template` gives for the question and its answer, token for token:
    the prompt is masked, the answer and the template's end of turn are trained on.

    Args:
        tokenizer: the model's.
        kind: ``causal`` or ``seq2seq``.
        style: ``chat`` puts the question into the tokenizer's chat template, without the scaffold of plain prompts.

    Raises:
        NALoRAError: chat style with a tokenizer that has no usable chat template.
    """

    tokenizer: Any
    kind: str = "causal"
    style: str = "plain"

    def __post_init__(self) -> None:
        _ = self._chat  # a template that cannot be used is refused here, before anything is written or trained

    @functools.cached_property
    def _chat(self) -> ChatTemplate | None:
        return ChatTemplate(self.tokenizer) if self.style == "chat" else None

    def question(self, example: Example) -> str:
        """The user's first turn: in chat style without the scaffold that plain text needs."""
        return example.question or example.prompt if self._chat else example.prompt

    def follow_up(self, example: Example, number: int) -> str:
        """The user's turn after the answer of that number, counted from 0."""
        bare = example.further_questions[number : number + 1] if self._chat else ()
        return bare[0] if bare else example.follow_ups[number]

    @property
    def end_tokens(self) -> list[int]:
        """The tokens that end an answer: the tokenizer's end of the sequence and the chat template's end of turn."""
        ends = [self.tokenizer.eos_token_id, *(self._chat.end_tokens if self._chat else [])]
        return [each for each in dict.fromkeys(ends) if each is not None]

    @property
    def end_texts(self) -> list[str]:
        """The text that ends an answer where a chat template ends turns without a special token."""
        return self._chat.end_texts if self._chat else []

    def prompt(self, turns: Sequence[str]) -> list[int]:
        """The tokens a model reads before it writes: a user's turn, or a conversation that ends with one."""
        if self._chat:
            return self._chat.prompt(turns)
        ids = list(self.tokenizer("".join(turns)).input_ids)
        # Some tokenizers close every text: a decoder must not read that before it writes.
        if self.kind == "causal" and len(ids) > 1 and ids[-1] == self.tokenizer.eos_token_id:
            ids.pop()
        return ids

    def target(self, text: str) -> list[int]:
        """The tokens a model should write, with the end of the sequence."""
        return [*self.tokenizer(text, add_special_tokens=False).input_ids, self.tokenizer.eos_token_id]

    def row(self, example: Example) -> Row:
        """A training row: input tokens and, at targets alone, labels."""
        if self._chat and self.kind == "causal":
            ids, before = self._chat.row(self.question(example), example.target)
            return {"input_ids": ids, "labels": [IGNORED_LABEL] * before + ids[before:]}
        prompt, target = self.prompt([self.question(example)]), self.target(example.target)
        if self.kind == "seq2seq":
            return {"input_ids": prompt, "labels": target}
        return {"input_ids": prompt + target, "labels": [IGNORED_LABEL] * len(prompt) + target}


@dataclass(frozen=True)
class TrainingRows:
    """What is trained on, and what had to give way: `examples` are trained on, `dropped` ones are not among them.

    `longest` is the number of tokens of the longest example, on its longer side for an encoder-decoder.
    """

    rows: list[Row]
    examples: int
    dropped: int
    cut: int
    longest: int = 0

    @property
    def target_tokens(self) -> int:
        """How many tokens the loss sees in one pass."""
        return sum(label != IGNORED_LABEL for row in self.rows for label in row["labels"])


def encode(
    examples: Sequence[Example],
    encoder: Encoder,
    max_length: int,
    *,
    too_long: str = "drop",
    packing: bool = False,
    limit: int | None = None,
) -> TrainingRows:
    """Examples as rows of at most `max_length` tokens, in their order; with a limit the first so many that fit.

    Raises:
        NALoRAError: no example fits.
    """
    rows: list[Row] = []
    dropped = cut = 0
    for example in examples:
        if limit is not None and len(rows) == limit:
            break
        row = encoder.row(example)
        longest = max(map(len, row.values()))
        if longest > max_length:
            # A row cut inside its prompt has no target left: nothing to learn from.
            learns = encoder.kind == "seq2seq" or any(label != IGNORED_LABEL for label in row["labels"][:max_length])
            if too_long == "drop" or not learns:
                dropped += 1
                continue
            cut += 1
            row = _cut(row, max_length, encoder)
        rows.append(row)
    if not rows:
        raise NALoRAError(
            "training data",
            found=f"{counted(len(examples), 'example')}, none of at most {max_length} tokens",
            expected="examples that fit",
            fix="raise max_length",
        )
    longest = max(len(ids) for row in rows for ids in row.values())
    return TrainingRows(pack(rows, max_length) if packing else rows, len(rows), dropped, cut, longest)


def _cut(row: Row, length: int, encoder: Encoder) -> Row:
    """The beginning of a row. An encoder's input keeps its closing token, which it has at every other length too."""
    cut = {name: ids[:length] for name, ids in row.items()}
    closing = encoder.tokenizer.eos_token_id
    if encoder.kind == "seq2seq" and row["input_ids"][-1:] == [closing]:
        cut["input_ids"][-1] = closing
    return cut


def pack(rows: Sequence[Row], max_length: int) -> list[Row]:
    """Rows joined in order, as many as fit. Positions start anew at each, which is how attention keeps them apart."""
    packed: list[Row] = []
    for row in rows:
        length = len(row["input_ids"])
        if not packed or len(packed[-1]["input_ids"]) + length > max_length:
            packed.append({"input_ids": [], "labels": [], "position_ids": []})
        last = packed[-1]
        last["input_ids"] += row["input_ids"]
        # The first token of a packed example is predicted by nothing that belongs to it.
        last["labels"] += [IGNORED_LABEL, *row["labels"][1:]]
        last["position_ids"] += range(length)
    return packed


@dataclass(frozen=True)
class Collator:
    """Pads rows to the longest of a batch, or the next `multiple`; the mask says which tokens are real.

    Packed rows become one long row without pads or mask: their positions say where each example begins.
    A blank (None) is one pad, whose mask is `blank`: 0, so that no statistics see it, or 1 for attention that cannot
    take a row without any real token.
    """

    # Whether None may stand in the place of a row.
    takes_blanks: ClassVar[bool] = True

    pad_token_id: int
    kind: str = "causal"
    multiple: int = 1
    blank: int = 0

    def __call__(self, rows: Sequence[Row | None]) -> dict[str, Tensor]:
        """A batch of tensors."""
        found = [row for row in rows if row is not None]
        if found and "position_ids" in found[0]:
            return self._packed(found)
        padding = {"input_ids": self.pad_token_id, "labels": IGNORED_LABEL}
        batch = {
            name: _padded([row[name] if row else [value] for row in rows], value, self.multiple)
            for name, value in padding.items()
        }
        real = [[1] * len(row["input_ids"]) if row else [self.blank] for row in rows]
        batch["attention_mask"] = _padded(real, 0, self.multiple)
        return batch

    def _packed(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        names = ("input_ids", "labels", "position_ids")
        return {name: torch.tensor([[value for row in rows for value in row[name]]]) for name in names}


def _padded(rows: list[list[int]], value: int, multiple: int) -> Tensor:
    length = math.ceil(max(map(len, rows)) / multiple) * multiple
    return torch.tensor([row + [value] * (length - len(row)) for row in rows])
