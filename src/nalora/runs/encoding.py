"""Examples as rows of tokens: only targets are in the loss, and examples that do not fit are counted."""

from __future__ import annotations

import contextlib
import functools
import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from nalora.control.tokens import IGNORED_LABEL
from nalora.errors import NALoRAError, counted
from nalora.runs.chat_template import ChatTemplate, Message
from nalora.runs.progress import Report
from nalora.runs.token_rows import MOST_STORED, DerivedRows, Row, StoredRows, packed_rows
from nalora.tasks import Example

# Rows between two reports of progress, about 0.1 s.
REPORTED_ROWS = 500


@dataclass(frozen=True)
class Encoder:
    """Turns examples into tokens, for a ``causal`` or ``seq2seq`` model, in ``plain`` or ``chat`` style.

    The style ``auto`` is chat for tokenizers that have a chat template.

    In plain style prompt and target are tokenised separately and joined, so that no token holds a part of both: the
    prompt's tokens are never trained on, and generation starts from exactly the tokens of training. In chat style a
    decoder's row equals the output of the tokenizer's `apply_chat_template` for question and answer, token for token:
    the prompt is masked, the answer and the template's end of turn are trained on.

    Raises:
        NALoRAError: chat style with a tokenizer that has no usable chat template.
    """

    tokenizer: Any
    kind: str = "causal"
    style: str = "plain"
    strict: bool = True  # as in `ChatTemplate`

    def __post_init__(self) -> None:
        _ = self._chat  # raises for an unusable template before anything is written or trained

    @functools.cached_property
    def _chat(self) -> ChatTemplate | None:
        chosen = self.style == "chat" or (self.style == "auto" and getattr(self.tokenizer, "chat_template", None))
        return ChatTemplate(self.tokenizer, strict=self.strict) if chosen else None

    @property
    def is_chat(self) -> bool:
        """Whether prompts are made by the chat template."""
        return self._chat is not None

    def opening(self, example: Example) -> list[Message]:
        """Return the messages before the answer; in chat style without the `Q: … A:` of plain prompts."""
        if not self._chat:
            return [{"role": "user", "content": example.prompt}]
        if example.messages:
            return list(example.messages[:-1])
        return [{"role": "user", "content": example.question or example.prompt}]

    def follow_up(self, example: Example, number: int) -> str:
        """Return the user's turn after answer `number`, counted from 0."""
        bare = example.further_questions[number : number + 1] if self._chat else ()
        return bare[0] if bare else example.follow_ups[number]

    @property
    def end_tokens(self) -> list[int]:
        """The tokens that end an answer: EOS and the chat template's end of turn."""
        ends = [self.tokenizer.eos_token_id, *(self._chat.end_tokens if self._chat else [])]
        return [token for token in dict.fromkeys(ends) if token is not None]

    @property
    def end_texts(self) -> list[str]:
        """The text that ends an answer if the chat template ends turns without a special token."""
        return self._chat.end_texts if self._chat else []

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens that generation starts from: those of a conversation that ends with a user's turn."""
        if self._chat:
            return self._chat.prompt(messages)
        ids = list(self.tokenizer("".join(message["content"] for message in messages)).input_ids)
        # Some tokenizers append EOS to every text, which must not be in a decoder's prompt.
        if self.kind == "causal" and len(ids) > 1 and ids[-1] == self.tokenizer.eos_token_id:
            ids.pop()
        return ids

    def target(self, text: str) -> list[int]:
        """Return the tokens that the model should generate, with EOS."""
        return [*self.tokenizer(text, add_special_tokens=False).input_ids, self.tokenizer.eos_token_id]

    def row(self, example: Example) -> Row:
        """Return a training row: input tokens, and labels for the answers only."""
        opening = self.opening(example)
        if self._chat and self.kind == "causal" and (example.prompt or example.messages):  # a text has no turns
            ids, trained = self._chat.row([*opening, {"role": "assistant", "content": example.target}])
            labels = [token if train else IGNORED_LABEL for token, train in zip(ids, trained, strict=True)]
            return {"input_ids": ids, "labels": labels}
        prompt = self.prompt(opening) if example.prompt else list(self.tokenizer("").input_ids)
        target = self.target(example.target)
        if self.kind == "seq2seq":
            return {"input_ids": prompt, "labels": target}
        return {"input_ids": prompt + target, "labels": [IGNORED_LABEL] * len(prompt) + target}


@dataclass(frozen=True)
class TrainingRows:
    """Rows of tokens, and the numbers of examples they hold, that were dropped and that were truncated.

    `longest` is the length of the longest example in tokens: the longer of its two sides for an encoder-decoder.
    `target_tokens` is the number of tokens in the loss of one epoch.
    """

    rows: Sequence[Row]
    examples: int
    dropped: int
    truncated: int
    longest: int
    target_tokens: int


def refuse_unusable_turns(conversations: Iterable[tuple[str, int, Example]], encoder: Encoder) -> None:
    """Raise a NALoRAError for the first conversation that cannot be encoded.

    Args:
        conversations: (file and line, number of rows with the same roles, example).
        encoder: has the chat template. Templates that refuse a conversation nearly always do so by its roles.
    """
    for where, count, example in conversations:
        with naming_row(where, f" ({counted(count, 'row')} with these turns)" if count > 1 else ""):
            encoder.row(example)


@contextlib.contextmanager
def naming_row(where: str | None, more: str = "") -> Iterator[None]:
    """Name the row in an error about its encoding."""
    try:
        yield
    except NALoRAError as error:
        if where is None:
            raise
        raise NALoRAError(where, found=error.found + more, expected=error.expected, fix=error.fix) from error


def encode(
    examples: Sequence[Example],
    encoder: Encoder,
    max_length: int,
    *,
    overlong: str = "drop",
    packing: bool = False,
    limit: int | None = None,
    report: Report = lambda *progress: None,
) -> TrainingRows:
    """Return the examples as rows of at most `max_length` tokens, in order; with a limit, the first `limit` that fit.

    Raises:
        NALoRAError: no example fits.
    """
    where: Callable[[int], str | None] = getattr(examples, "where", lambda index: None)
    stored: StoredRows | None = StoredRows()
    indices, lengths = array("Q"), array("L")
    dropped = truncated = longest = target_tokens = 0
    for index, example in enumerate(examples):
        if limit is not None and len(indices) == limit:
            break
        if index % REPORTED_ROWS == 0:
            report("tokenising", index, len(examples))
        with naming_row(where(index)):
            row = encoder.row(example)
        if length_of(row) > max_length:
            row = _truncated(row, max_length, encoder)
            # A row that is truncated inside its prompt has no target left to train on.
            if overlong == "drop" or all(label == IGNORED_LABEL for label in row["labels"]):
                dropped += 1
                continue
            truncated += 1
        indices.append(index)
        lengths.append(len(row["input_ids"]))
        longest = max(longest, length_of(row))
        target_tokens += _targets(row, packing)
        if stored is not None:
            stored.append(row)
            stored = stored if stored.tokens <= MOST_STORED else None
    if not indices:
        raise NALoRAError(
            "training data",
            found=f"{counted(len(examples), 'example')}, none of at most {max_length} tokens",
            expected="examples that fit",
            fix="raise max_length",
        )
    rows: Sequence[Row] = stored or DerivedRows(
        lengths, lambda index: _truncated(encoder.row(examples[indices[index]]), max_length, encoder)
    )
    rows = packed_rows(rows, lengths, max_length, join) if packing else rows
    return TrainingRows(rows, len(indices), dropped, truncated, longest, target_tokens)


def length_of(row: Row) -> int:
    """Return the number of tokens that `max_length` limits: of the longer side for an encoder-decoder."""
    return max(map(len, row.values()))


def _targets(row: Row, packing: bool) -> int:
    """Return the number of labels; the first token of a packed example has none."""
    return sum(label != IGNORED_LABEL for label in row["labels"][1 if packing else 0 :])


def _truncated(row: Row, length: int, encoder: Encoder) -> Row:
    """Return the beginning of a row. An encoder's input keeps its final EOS, which it has at every other length."""
    result = {name: ids[:length] for name, ids in row.items()}
    eos = encoder.tokenizer.eos_token_id
    if encoder.kind == "seq2seq" and row["input_ids"][-1:] == [eos]:
        result["input_ids"][-1] = eos
    return result


def join(rows: Sequence[Row]) -> Row:
    """Return one packed row. Positions restart at 0 in each example, which isolates them in attention."""
    # The first token of a packed example would be predicted from the example before it.
    return {
        "input_ids": [token for row in rows for token in row["input_ids"]],
        "labels": [label for row in rows for label in (IGNORED_LABEL, *row["labels"][1:])],
        "position_ids": [position for row in rows for position in range(len(row["input_ids"]))],
    }


@dataclass(frozen=True)
class Collator:
    """Pads rows to the longest of the batch, or the next `multiple`, with an attention mask.

    Packed rows become one long row without padding or mask: their positions mark where each example begins.
    None, a placeholder for a row, becomes one padding token with the mask `placeholder_mask`: 0, so that no statistics
    count it, or 1 for attention implementations that fail on a row without real tokens.
    """

    accepts_none: ClassVar[bool] = True

    pad_token_id: int
    multiple: int = 1
    placeholder_mask: int = 0

    def __call__(self, rows: Sequence[Row | None]) -> dict[str, Tensor]:
        """Return a batch of tensors."""
        packed = [row for row in rows if row is not None and "position_ids" in row]
        if packed:
            names = ("input_ids", "labels", "position_ids")
            return {name: torch.tensor([[value for row in packed for value in row[name]]]) for name in names}
        padding = {"input_ids": self.pad_token_id, "labels": IGNORED_LABEL}
        batch = {
            name: self._padded([row[name] if row else [pad] for row in rows], pad) for name, pad in padding.items()
        }
        mask = [[1] * len(row["input_ids"]) if row else [self.placeholder_mask] for row in rows]
        return batch | {"attention_mask": self._padded(mask, 0)}

    def _padded(self, rows: list[list[int]], value: int) -> Tensor:
        length = math.ceil(max(map(len, rows)) / self.multiple) * self.multiple
        return torch.tensor([row + [value] * (length - len(row)) for row in rows])
