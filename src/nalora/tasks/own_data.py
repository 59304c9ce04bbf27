"""Your own data as a task: a file, a folder or a data set of the hub, with its test set and a measure."""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nalora.errors import NALoRAError, counted, missing_path, require, unknown_name, wrong_value
from nalora.files import python_files
from nalora.tasks.data_files import HUB, Rows, open_rows
from nalora.tasks.data_formats import Conversation, Reader, reader_for
from nalora.tasks.splits import question_key
from nalora.tasks.task import Example, ModelKind, Scores, Task, TrainingInputs, alpaca
from nalora.tasks.text_measures import MEASURES, matching, suitable

if TYPE_CHECKING:
    from nalora.models.loading import Loaded

# Without test data this share of the rows is held out as the test set, but not more rows than that.
_TEST_SHARE = 0.1
_MOST_TEST_ROWS = 1_000
# Rows that cannot be read and that an error lists; it also gives their total number.
_LISTED = 5
_TITLES = {"system": "System", "user": "User", "assistant": "Assistant", "tool": "Tool"}


class OwnData(Task):
    """A task from data files; `nalora data FILE` shows how they are read.

    Args:
        source: the training data: a file (.jsonl, .json, .csv, .tsv, .parquet), a folder, or ``hub:owner/name``.
        test: the test data; by default the folder's or data set's test split, or else a held-out share of the rows.
        test_share: the share of rows that is held out as the test set (default: a tenth, at most 1,000 rows).
        format: messages, prompt/completion, instruction/output, question/answer or text; recognised by default.
        columns: the file's column for each role of the format, such as ``{question: body, answer: result}``.
        measure: exact_match, f1, contains, number, choice, regex (with `pattern`), or a list of them; by default those
            that suit the test answers.
        pattern: the regular expression of the measure regex; its first group is compared.
        score: a Python file with a function ``score(question, expected, output)`` that returns a number from 0 to 1.
        system: a system message for rows that have none.
        max_new_tokens: the longest answer in tokens.

    Raises:
        NALoRAError: files that are missing, rows that cannot be read, with file and line, or an unknown measure.
    """

    name = "FILE"
    title = "your own data: a .jsonl, .json, .csv, .tsv or .parquet file, a folder, or hub:owner/name"
    measures = tuple(MEASURES)
    models: tuple[ModelKind, ...] = ("causal", "seq2seq")

    def __init__(
        self,
        source: str,
        test: str | None = None,
        test_share: float | None = None,
        format: str | None = None,
        columns: Mapping[str, str] | None = None,
        measure: str | list[str] | None = None,
        pattern: str | None = None,
        score: str | None = None,
        system: str = "",
        max_new_tokens: int = 256,
    ) -> None:
        test_share = None if test_share is None else float(test_share)
        require(test_share is None or 0 < test_share < 1, "test_share", test_share, "a number between 0 and 1")
        require(test_share is None or test is None, "test_share", test_share, "none with test", "remove one of them")
        self.name, self.max_new_tokens = Path(source).name, max_new_tokens
        self._reading: dict[str, Any] = {"format": format, "columns": columns, "system": system}
        self._train = ExampleRows.opened(source, "train", **self._reading)
        self._test = self._test_data(source, test, test_share)
        self._score_file = score
        self._measures = self._own_measure(score) if score else self._chosen(measure, pattern)
        self.measures = tuple(self._measures)
        if self.reader.format.name == "text":
            self.models = ("causal",)

    @property
    def reader(self) -> Reader:
        """The format of the training data and its columns."""
        return self._train.reader

    def train_examples(self) -> Sequence[Example]:
        """Return the rows for training, in file order."""
        return self._train

    def test_examples(self) -> Sequence[Example]:
        """Return the rows of the test data, or those that were held out, in file order."""
        return self._test

    def training_set(self) -> Sequence[Example]:
        """Return `train_examples` without rows whose question is in the test set."""
        tested = {example_key(example) for example in self._test}
        kept, self.dropped_test_questions = self._train.without(tested)
        if not kept:
            raise NALoRAError(
                self.name,
                found=f"each of the {len(self._train):,} training rows in the test set",
                expected="training rows that the test set does not have",
                fix="give a test file with different questions",
            )
        return kept

    def key_of_training(self, example: Example) -> str:
        """Return the key of a conversation or text, see `example_key`."""
        return example_key(example)

    def content(self, examples: Sequence[Example]) -> list[Any]:
        """Return the content of the examples, and the code of an own measure: other scores are another evaluation."""
        code = [Path(self._score_file).read_text(encoding="utf-8")] if self._score_file else []
        return [*super().content(examples), *code]

    def training_inputs(
        self, loaded: Loaded, validation_size: int, limit: int | None, encode: Callable[..., TrainingInputs]
    ) -> TrainingInputs:
        """Encode the rows one by one, without a list of all examples, unless some are held out for validation."""
        if validation_size:
            return super().training_inputs(loaded, validation_size, limit, encode)
        return encode(self.training_set())

    def prepare_scoring(self) -> None:
        """Raise a NALoRAError for texts, which have no questions to answer."""
        if self.reader.format.name == "text":
            raise NALoRAError(
                self.name,
                found="texts without questions",
                expected="questions and answers to generate and score",
                fix="give test data with questions (test: FILE); a study with generate: none reports the loss of texts",
            )

    def score(self, example: Example, outputs: Sequence[str]) -> Scores:
        """Compare the output with the expected answer by every measure."""
        return {name: measure(example, outputs[0]) for name, measure in self._measures.items()}

    def _test_data(self, source: str, test: str | None, share: float | None) -> ExampleRows:
        if test is not None:
            return ExampleRows.opened(test, "test", **self._reading)
        if share is None and (source.startswith(HUB) or Path(source).is_dir()):
            try:
                return ExampleRows.opened(source, "test", **self._reading)
            except NALoRAError as error:
                if not error.found.startswith(("no file for", "no split")):
                    raise
        share = min(_TEST_SHARE, _MOST_TEST_ROWS / len(self._train)) if share is None else share
        self._train, held_out = self._train.split(share)
        return held_out

    def _chosen(self, measure: str | list[str] | None, pattern: str | None) -> dict[str, Any]:
        names = [measure] if isinstance(measure, str) else list(measure or ())
        try:
            known = {**MEASURES, **({"regex": matching(pattern)} if pattern is not None else {})}
        except re.error as error:
            raise wrong_value("pattern", pattern, f"a regular expression ({error})") from error
        require("regex" not in names or pattern is not None, "pattern", None, "a regular expression for measure: regex")
        for name in names:
            if name not in known:
                raise unknown_name(f"measure: {name}", "no such measure", name, [*MEASURES, "regex"], "choose one")
        targets = [self._test[index].target for index in range(min(200, len(self._test)))]
        names = names or (["regex"] if pattern is not None else list(suitable(targets)))
        return {name: lambda example, output, name=name: known[name](output, example.target) for name in names}

    @staticmethod
    def _own_measure(file: str) -> dict[str, Any]:
        if not Path(file).is_file() or Path(file).suffix != ".py":
            raise missing_path("file", f"score: {file}", "a Python file with score(question, expected, output)")
        function = getattr(python_files.load(Path(file)), "score", None)
        if not callable(function):
            raise NALoRAError(
                f"score: {file}",
                found="no function score",
                expected="score(question, expected, output)",
                fix="add it; it returns a number from 0 to 1",
            )

        def scored(example: Example, output: str) -> float:
            value = function(example.question, example.target, output)
            if not isinstance(value, (int, float)) or not 0 <= value <= 1:
                raise wrong_value(f"score: {file}", value, "a number from 0 to 1", "return one from score()")
            return float(value)

        return {"score": scored}


class ExampleRows(Sequence[Example]):
    """The rows of a data file as examples, read when they are needed.

    Args:
        rows: the data file.
        reader: reads a row as a conversation.
        name: the beginning of the examples' ids.
        places: the numbers of the rows; all by default.
        system: a system message for rows that have none.
    """

    def __init__(self, rows: Rows, reader: Reader, name: str, places: array[int] | range, system: str = "") -> None:
        self.rows, self.reader, self.name, self.places, self.system = rows, reader, name, places, system

    @classmethod
    def opened(cls, source: str, split: str, *, format: str | None, columns: Any, system: str) -> ExampleRows:
        """Open a data file and check that every row can be read.

        Raises:
            NALoRAError: rows that cannot be read, with file and line.
        """
        rows = open_rows(source, split)
        reader = reader_for(source, rows[0], format, columns)
        examples = cls(rows, reader, f"{Path(source).stem}-{split}", range(len(rows)), system)
        problems = []
        for index in range(len(rows)):
            try:
                reader(rows[index])
            except ValueError as error:
                problems.append(f"{rows.where(index)}: {error}")
        if problems:
            more = f"; … {len(problems):,} in total" if len(problems) > _LISTED else ""
            raise NALoRAError(
                source,
                found="; ".join(problems[:_LISTED]) + more,
                expected=f"rows of the format {reader.format.name}",
                fix="correct or remove them, or name other columns with columns",
            )
        return examples

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self._only(self.places[index])
        place = self.places[index]
        return self._example(f"{self.name}-{place}", self.reader(self.rows[place]))

    def split(self, share: float) -> tuple[ExampleRows, ExampleRows]:
        """Return (the remaining rows, a share of the rows), chosen by a hash of the question.

        Equal questions are on the same side, and adding rows to the file moves no other row.
        """
        chosen = [_hash(example_key(example)) < share * 2**64 for example in self]
        if not any(chosen):  # a file of a few rows
            chosen[-1] = True
        sides = (array("Q", (p for p, c in zip(self.places, chosen, strict=True) if c == side)) for side in (0, 1))
        remaining, held_out = (self._only(places) for places in sides)
        if not remaining:
            raise NALoRAError(
                self.name,
                found=f"{counted(len(self), 'row')}, all of them held out as the test set",
                expected="rows with different questions for training and for the test set",
                fix="add rows, or give test data with test: FILE",
            )
        return remaining, held_out

    def without(self, keys: set[str]) -> tuple[ExampleRows, int]:
        """Return the rows whose question is not among these keys, and the number of the others."""
        kept = array("Q", (place for place, e in zip(self.places, self, strict=True) if example_key(e) not in keys))
        return self._only(kept), len(self) - len(kept)

    def _only(self, places: array[int] | range) -> ExampleRows:
        return ExampleRows(self.rows, self.reader, self.name, places, self.system)

    def _example(self, id: str, conversation: Conversation) -> Example:
        if not conversation.messages:
            return Example(id, "", conversation.text)
        messages = conversation.messages
        if self.system and messages[0]["role"] != "system":
            messages = ({"role": "system", "content": self.system}, *messages)
        last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
        before, target = messages[:last], messages[last]["content"]
        question = next((m["content"] for m in reversed(before) if m["role"] == "user"), "")
        prompt = _PROMPTS.get(self.reader.format.name, _dialogue)(before, question)
        return Example(id, prompt, target, question=question, messages=messages[: last + 1])


def example_key(example: Example) -> str:
    """Return the text by which a row is recognised in another file: all turns before the target, or all of a text."""
    turns = [message["content"] for message in example.messages[:-1] if message["role"] != "system"]
    return question_key(" ".join(turns) or example.target)


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest(), "big")


def _dialogue(before: Sequence[Mapping[str, str]], question: str) -> str:
    """Return a conversation as plain text, for models without a chat template."""
    return "".join(f"{_TITLES[m['role']]}: {m['content']}\n\n" for m in before) + "Assistant: "


def _with_system(template: Any) -> Any:
    def prompt(before: Sequence[Mapping[str, str]], question: str) -> str:
        system = before[0]["content"] + "\n\n" if before and before[0]["role"] == "system" else ""
        return f"{system}{template(question)}"

    return prompt


# What plain text needs around a question; a chat template has its own.
_PROMPTS = {
    "prompt/completion": _with_system(lambda question: question),
    "instruction/output": _with_system(alpaca),
    "question/answer": _with_system(lambda question: f"Q: {question}\nA: "),
}
