"""The rows of a data file as examples: checked once, then read when they are needed.

A row takes 24 bytes of memory: where it begins, its line, and a hash of its question, by which it is compared.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from nalora.errors import NALoRAError, counted, listed
from nalora.models.file_digest import settled_state
from nalora.tasks.data_files import Rows, files_for, open_rows, opened_and_checked
from nalora.tasks.data_formats import Conversation, Reader, reader_for
from nalora.tasks.splits import hold_out_indices, question_key
from nalora.tasks.task import Example, alpaca
from nalora.tasks.text_files import REPORTED_ROWS, Report

_TITLES = {"system": "System", "user": "User", "assistant": "Assistant", "tool": "Tool"}
# A study checks the files of its training set and its test set once for each of its runs.
_MOST_KEPT = 4
_kept: dict[tuple[Any, ...], CheckedRows] = {}


class Turns(NamedTuple):
    """The first row with certain turns, and the number of rows that have the same."""

    place: int
    rows: int


@dataclass(frozen=True)
class CheckedRows:
    """A data file of which every row can be read.

    Args:
        rows: its rows.
        reader: reads a row as a conversation.
        keys: the hash of each row's question.
        turns: the roles of a conversation's messages → the rows that have them.
    """

    rows: Rows
    reader: Reader
    keys: array[int]
    turns: Mapping[tuple[str, ...], Turns]


def checked_rows(
    source: str, split: str, format: str | None, columns: Mapping[str, str] | None, report: Report
) -> CheckedRows:
    """Open a data file and check that every row can be read; a file that has not changed is not checked again.

    Raises:
        NALoRAError: rows that cannot be read, with file and line.
    """
    states = [settled_state(file) for file in files_for(source, split) if file.is_file()]
    identity = (source, format, tuple((columns or {}).items()), *states)
    if identity in _kept:
        return _kept[identity]
    checked = opened_and_checked(
        lambda: open_rows(source, split, report), lambda rows: _checked(source, rows, format, columns, report)
    )
    if states and None not in states:
        while len(_kept) >= _MOST_KEPT:
            _kept.pop(next(iter(_kept)))
        _kept[identity] = checked
    return checked


def _checked(
    source: str, rows: Rows, format: str | None, columns: Mapping[str, str] | None, report: Report
) -> CheckedRows:
    reader = reader_for(source, rows[0], format, columns)
    keys, turns = array("Q"), dict[tuple[str, ...], Turns]()

    def problems() -> Iterator[str]:
        for place in range(len(rows)):
            try:
                conversation = reader(rows[place])
            except ValueError as error:
                yield f"{rows.where(place)}: {error}"
                continue
            keys.append(_key(conversation))
            roles = tuple(message["role"] for message in conversation.messages)
            first = turns.get(roles, Turns(place, 0))
            turns[roles] = first._replace(rows=first.rows + 1)
            if (place + 1) % REPORTED_ROWS == 0 or place + 1 == len(rows):
                report("checking rows", place + 1, len(rows))

    if found := listed(problems()):
        raise NALoRAError(
            source,
            found=found,
            expected=f"rows of the format {reader.format.name}",
            fix="correct or remove them, or name other columns with columns",
        )
    return CheckedRows(rows, reader, keys, turns)


class ExampleRows(Sequence[Example]):
    """Rows of a data file as examples.

    Args:
        checked: the data file.
        split: ``train`` or ``test``, the beginning of the examples' ids.
        system: a system message for rows that have none.
        places: the numbers of the rows; all by default.
    """

    def __init__(
        self, checked: CheckedRows, split: str, system: str = "", places: array[int] | range | None = None
    ) -> None:
        self.checked, self.split, self.system = checked, split, system
        self.places = range(len(checked.rows)) if places is None else places

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self._only(self.places[index])
        return self._example(self.places[index])

    def where(self, index: int) -> str:
        """Return the file and line of an example."""
        return self.checked.rows.where(self.places[index])

    @property
    def keys(self) -> Iterator[int]:
        """The hashes of the questions."""
        return (self.checked.keys[place] for place in self.places)

    def one_of_each(self) -> Iterator[tuple[str, int, Example]]:
        """Return (file and line, number of rows, example) for each sequence of roles that the whole file has."""
        for roles, (place, count) in self.checked.turns.items():
            if roles:
                yield self.checked.rows.where(place), count, self._example(place)

    def separate(self, share: float) -> tuple[ExampleRows, ExampleRows]:
        """Return (the remaining rows, a share of the rows), chosen by a hash of the question.

        Equal questions are on the same side, and adding rows to the file moves no other row.
        """
        chosen = array("b", (key < share * 2**64 for key in self.keys))
        if not any(chosen):  # a file of a few rows
            chosen[-1] = True
        remaining, held_out = self._where(chosen.__getitem__, False), self._where(chosen.__getitem__, True)
        if not remaining:
            raise NALoRAError(
                "test_share",
                found=f"{counted(len(self), 'row')}, all of them held out as the test set",
                expected="rows with different questions for training and for the test set",
                fix="add rows, or give test data with test: FILE",
            )
        return remaining, held_out

    def without(self, questions: ExampleRows) -> tuple[ExampleRows, ExampleRows]:
        """Return the rows whose question is not among these, and the others."""
        known = set(questions.keys)
        shared = array("b", (key in known for key in self.keys))
        return self._where(shared.__getitem__, False), self._where(shared.__getitem__, True)

    def hold_out(self, size: int) -> tuple[ExampleRows, ExampleRows]:
        """Return (training rows, held-out rows) as `splits.hold_out` does, without reading them."""
        ids = [self._id(place) for place in self.places]
        train, held_out = hold_out_indices(ids, size, list(self.keys))
        return self._at(train), self._at(held_out)

    def _where(self, value: Callable[[int], Any], wanted: bool) -> ExampleRows:
        return self._at([index for index in range(len(self)) if bool(value(index)) == wanted])

    def _at(self, indices: Collection[int]) -> ExampleRows:
        return self._only(array("Q", (self.places[index] for index in indices)))

    def _only(self, places: array[int] | range) -> ExampleRows:
        return ExampleRows(self.checked, self.split, self.system, places)

    def _id(self, place: int) -> str:
        return f"{self.split}-{place}"

    def _example(self, place: int) -> Example:
        conversation = self.checked.reader(self.checked.rows[place])
        source = Path(self.checked.rows.where(place)).name
        if not conversation.messages:
            return Example(self._id(place), "", conversation.text, source=source)
        messages = conversation.messages
        if self.system and messages[0]["role"] != "system":
            messages = ({"role": "system", "content": self.system}, *messages)
        before, target = messages[:-1], messages[-1]["content"]
        question = next((m["content"] for m in reversed(before) if m["role"] == "user"), "")
        prompt = plain_prompt(self.checked.reader.format.name, before, question)
        return Example(self._id(place), prompt, target, question=question, messages=messages, source=source)


def example_key(example: Example) -> int:
    """Return the hash by which a row is recognised in another file: of all turns before the target, or of a text."""
    return _key(Conversation(tuple(dict(message) for message in example.messages), example.target))


def _key(conversation: Conversation) -> int:
    turns = [message["content"] for message in conversation.messages[:-1] if message["role"] != "system"]
    last = conversation.messages[-1]["content"] if conversation.messages else conversation.text
    text = question_key(" ".join(turns) or last)
    return int.from_bytes(hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest(), "big")


def plain_prompt(format: str, before: Sequence[Mapping[str, str]], question: str) -> str:
    """Return the messages before an answer, the last of them the question, as plain text of a format."""
    return _PROMPTS.get(format, _dialogue)(before, question)


def _dialogue(before: Sequence[Mapping[str, str]], question: str) -> str:
    """Return a conversation as plain text, for models without a chat template."""
    return "".join(f"{_TITLES[m['role']]}: {m['content']}\n\n" for m in before) + "Assistant: "


def _with_system(template: Callable[[str], str]) -> Callable[[Sequence[Mapping[str, str]], str], str]:
    def prompt(before: Sequence[Mapping[str, str]], question: str) -> str:
        system = before[0]["content"] + "\n\n" if before and before[0]["role"] == "system" else ""
        return f"{system}{template(question)}"

    return prompt


# What plain text needs around a question; a chat template has its own.
_PROMPTS = {
    "prompt/completion": _with_system(lambda question: question),
    "instruction/output": _with_system(alpaca),
    "question/answer": _with_system(lambda question: f"Q: {question}\nA: "),
    "text": _with_system(lambda question: question),
}
