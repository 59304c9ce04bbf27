"""Your own data as a task: a file, a folder or a data set of the hub, with its test set and a measure."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nalora.errors import NALoRAError, missing_path, require, unknown_name, wrong_value
from nalora.files import python_files
from nalora.tasks.data_files import HUB
from nalora.tasks.data_formats import Reader
from nalora.tasks.example_rows import ExampleRows, checked_rows, example_key
from nalora.tasks.sources import NoSplitError
from nalora.tasks.task import Example, ModelKind, Scores, Task
from nalora.tasks.text_files import Report
from nalora.tasks.text_measures import MEASURES, matching, suitable

# Without test data this share of the rows is held out as the test set, but not more rows than that.
_TEST_SHARE = 0.1
_MOST_TEST_ROWS = 1_000


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
        report: for a progress bar while the files are read; not a setting.

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
        report: Report = lambda *progress: None,
    ) -> None:
        test_share = None if test_share is None else float(test_share)
        require(test_share is None or 0 < test_share < 1, "test_share", test_share, "a number between 0 and 1")
        require(test_share is None or test is None, "test_share", test_share, "none with test", "remove one of them")
        self.name, self.max_new_tokens = Path(source).name, max_new_tokens
        self._reading: dict[str, Any] = {"format": format, "columns": columns, "report": report}
        self._train = ExampleRows(checked_rows(source, "train", **self._reading), "train", system)
        self._test = self._test_data(source, test, test_share)
        self._score_file = score
        self._measures = self._own_measure(score) if score else self._chosen(measure, pattern)
        self.measures = tuple(self._measures)
        if self.reader.format.name == "text":
            self.models = ("causal",)

    @property
    def reader(self) -> Reader:
        """The format of the training data and its columns."""
        return self._train.checked.reader

    def train_examples(self) -> ExampleRows:
        """Return the rows for training, in file order."""
        return self._train

    def test_examples(self) -> ExampleRows:
        """Return the rows of the test data, or those that were held out, in file order."""
        return self._test

    def training_set(self) -> ExampleRows:
        """Return `train_examples` without rows whose question is in the test set."""
        kept, self.also_tested = self._train.without(self._test)
        self.dropped_test_questions = len(self.also_tested)
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
        return f"{example_key(example):016x}"

    def content(self, examples: Sequence[Example]) -> list[Any]:
        """Return the content of the examples, and the code of an own measure: other scores are another evaluation."""
        code = [Path(self._score_file).read_text(encoding="utf-8")] if self._score_file else []
        return [*super().content(examples), *code]

    def validation_split(self, size: int) -> tuple[ExampleRows, ExampleRows]:
        """Return the training set without held-out rows and rows with their questions, and the held-out rows."""
        return self.training_set().hold_out(size)

    def conversations(self) -> Iterable[tuple[str, int, Example]]:
        """Return an example for each sequence of roles in the training data and in the test data."""
        files = {id(rows.checked): rows for rows in (self._train, self._test)}
        return itertools.chain.from_iterable(rows.one_of_each() for rows in files.values())

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
            return self._opened_test(test)
        if share is None and (source.startswith(HUB) or Path(source).is_dir()):
            with contextlib.suppress(NoSplitError):
                return self._opened_test(source)
        share = min(_TEST_SHARE, _MOST_TEST_ROWS / len(self._train)) if share is None else share
        self._train, held_out = self._train.separate(share)
        return held_out

    def _opened_test(self, source: str) -> ExampleRows:
        return ExampleRows(checked_rows(source, "test", **self._reading), "test", self._train.system)

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
