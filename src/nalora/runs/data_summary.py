"""What a model would be trained on, before it is: lengths in tokens, rows that are left out and why, an example."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from nalora.control.tokens import IGNORED_LABEL
from nalora.runs.encoding import REPORTED_ROWS, Encoder, length_of, naming_row, refuse_unusable_turns
from nalora.runs.progress import Report
from nalora.tasks import Example
from nalora.tasks.example_rows import ExampleRows
from nalora.tasks.own_data import OwnData

# The rows that a reason names; it also gives their number.
_NAMED_ROWS = 3
_QUANTILES = (0.0, 0.5, 0.9, 1.0)


class LeftOut(NamedTuple):
    """Rows that would not be trained on: why, how many, and where the first ones are."""

    reason: str
    rows: int
    first: list[str]


class Part(NamedTuple):
    """A part of an example: its text, whether it is trained on, and its number of tokens, 0 without a tokenizer."""

    text: str
    trained: bool
    tokens: int = 0


class TokenCounts(NamedTuple):
    """Minimum, median, 90th percentile and maximum over the training rows, by what is counted; rows that are too long.

    For a decoder the tokens of a row and how many of them are trained on, for an encoder-decoder those of the input and
    of the target.
    """

    quantiles: dict[str, list[int]]
    too_long: LeftOut


def also_tested(rows: ExampleRows) -> LeftOut:
    """Return the rows whose question is in the test set."""
    first = [rows.where(index) for index in range(min(_NAMED_ROWS, len(rows)))]
    return LeftOut("the question is in the test set", len(rows), first)


def count_tokens(task: OwnData, train: ExampleRows, encoder: Encoder, max_length: int, report: Report) -> TokenCounts:
    """Tokenise every training row as a training would.

    Raises:
        NALoRAError: turns that the chat template does not accept, with file and line.
    """
    refuse_unusable_turns(task.conversations(), encoder)
    decoder = encoder.kind == "causal"
    names = ("tokens per row", "trained tokens per row") if decoder else ("tokens of the input", "tokens of the target")
    counts = {name: array("L") for name in names}
    too_long, first = 0, list[str]()
    for index, example in enumerate(train):
        with naming_row(train.where(index)):
            row = encoder.row(example)
        trained = sum(label != IGNORED_LABEL for label in row["labels"])
        for name, count in zip(names, (len(row["input_ids"]), trained), strict=True):
            counts[name].append(count)
        if length_of(row) > max_length:
            too_long += 1
            if len(first) < _NAMED_ROWS:
                first.append(f"{train.where(index)} ({length_of(row):,})")
        if (index + 1) % REPORTED_ROWS == 0 or index + 1 == len(train):
            report("tokenising", index + 1, len(train))
    quantiles = {name: _quantiles(values) for name, values in counts.items()}
    return TokenCounts(quantiles, LeftOut(f"more than {max_length:,} tokens", too_long, first))


def example_parts(example: Example, encoder: Encoder | None) -> list[Part]:
    """Return an example as it would be trained on, decoded from its tokens: of an encoder-decoder input and target."""
    if encoder is None:
        return [Part(example.prompt, False), Part(example.target, True)]
    row = encoder.row(example)
    if encoder.kind == "causal":
        pairs = itertools.groupby(zip(row["labels"], row["input_ids"], strict=True), lambda pair: pair[0] == pair[1])
        groups = [(trained, [token for _, token in group]) for trained, group in pairs]
    else:
        groups = [(False, row["input_ids"]), (True, row["labels"])]
    # Several tokens at once: one alone may be a part of a letter, or lose the space before it.
    return [Part(encoder.tokenizer.decode(tokens), trained, len(tokens)) for trained, tokens in groups]


def _quantiles(values: Sequence[int]) -> list[int]:
    ordered = sorted(values)
    return [ordered[int(share * (len(ordered) - 1))] for share in _QUANTILES]
