"""Your own data as a task: a file, a folder or a data set of the hub, with its test set and a measure."""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nalora.errors import NALoRAError, counted, missing_path, require, unknown_name, wrong_value
from nalora.files import python_files
from nalora.tasks.data_files import HUB
from nalora.tasks.data_formats import Reader
from nalora.tasks.example_rows import ExampleRows, checked_rows, example_key
from nalora.tasks.judge import Judge
from nalora.tasks.rated_answers import SYSTEM, grading_prompt, rated
from nalora.tasks.sources import NoSplitError
from nalora.tasks.task import Example, ModelKind, Scores, Task
from nalora.tasks.text_files import Report
from nalora.tasks.text_measures import MEASURES, matching, suitable

# Without test data this share of the rows is held out as the test set, but not more rows than that.
_TEST_SHARE = 0.1
_MOST_TEST_ROWS = 1_000
_JUDGE = "judge"


class OwnData(Task):
    """A task from data files; `nalora data FILE` shows how they are read.

    Args:
        source: the training data: a file (.jsonl, .json, .csv, .tsv, .parquet), a folder, or ``hub:owner/name``.
        test: the test data; by default the folder's or data set's test split, or else a held-out share of the rows.
        test_share: the share of rows that is held out as the test set (default: a tenth, at most 1,000 rows).
        format: messages, prompt/completion, instruction/output, question/answer or text; recognised by default.
        columns: the file's column for each role of the format, such as ``{question: body, answer: result}``.
        measure: exact_match, f1, contains, number, choice, regex (with `pattern`), judge (with `judge_model`), or a
            list of them; by default those that suit the test answers.
        pattern: the regular expression of the measure regex; its first group is compared.
        score: a Python file with a function ``score(question, expected, output)`` that returns a number from 0 to 1.
        judge_model: the name of a language model on its server that rates answers from 1 to 10.
        judge_url: an OpenAI-compatible server; by default OPENAI_BASE_URL, then OpenAI's. The key is OPENAI_API_KEY.
        judge_tokens: maximum length of the judge's answer; one that is cut off is not a verdict.
        judge_timeout: time limit in seconds for one answer of the judge.
        judgements: a JSON-lines file that records the judge's answers, so that a repeated run requests none twice.
        system: a system message for rows that have none.
        max_new_tokens: the longest answer in tokens.
        every_row: whether every row is a test row where none is held out by a setting or a split, for an evaluation of
            what was not trained on this data; not a setting.
        report: for a progress bar while the files are read; not a setting.

    Raises:
        NALoRAError: files that are missing, rows that cannot be read, with file and line, or an unknown measure.
    """

    name = "FILE"
    title = "your own data: a .jsonl, .json, .csv, .tsv or .parquet file, a folder, or hub:owner/name"
    measures = (*MEASURES, "regex", _JUDGE)
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
        judge_model: str | None = None,
        judge_url: str | None = None,
        judge_tokens: int = 2048,
        judge_timeout: float = 300.0,
        judgements: str | Path | None = None,
        system: str = "",
        max_new_tokens: int = 256,
        every_row: bool = False,
        report: Report = lambda *progress: None,
    ) -> None:
        test_share = None if test_share is None else float(test_share)
        require(
            test_share is None or 0 < test_share < 1,
            "test_share",
            test_share,
            "a number between 0 and 1",
            f"choose one; test={source} makes every row a test row, to evaluate and not to train on",
        )
        require(test_share is None or test is None, "test_share", test_share, "none with test", "remove one of them")
        self.name, self.max_new_tokens = Path(source).name, max_new_tokens
        self._reading: dict[str, Any] = {"format": format, "columns": columns, "report": report}
        self._train = ExampleRows(checked_rows(source, "train", **self._reading), "train", system)
        self._test = self._test_data(source, test, test_share, every_row)
        self._score_file = score
        self.judge = Judge.of_settings(judge_model, judge_url, judge_tokens, judge_timeout, judgements)
        self._measures = self._own_measure(score) if score else self._chosen(measure, pattern)
        self.measures = tuple(self._measures)
        if _JUDGE in self.measures:
            self.scoring_threads = 8
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

    def evaluated(self, limit: int | None = None) -> str:
        """Return how many rows an evaluation covers, of how many rows in the files of the test set."""
        rows = len(self._test.checked.rows)
        count = len(self._test) if limit is None else min(limit, len(self._test))
        held_out = ", the others are for training" if len(self._test) < rows else ""
        return f"evaluating {count:,} of {counted(rows, 'row')}{held_out}"

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
        prompt = [SYSTEM, grading_prompt(Example("", ""), "")] if _JUDGE in self.measures else []
        return [*super().content(examples), *code, *prompt]

    def validation_split(self, size: int) -> tuple[ExampleRows, ExampleRows]:
        """Return the training set without held-out rows and rows with their questions, and the held-out rows."""
        return self.training_set().hold_out(size)

    def conversations(self) -> Iterable[tuple[str, int, Example]]:
        """Return an example for each sequence of roles in the training data and in the test data."""
        files = {id(rows.checked): rows for rows in (self._train, self._test)}
        return itertools.chain.from_iterable(rows.one_of_each() for rows in files.values())

    def refuse_unready(self) -> None:
        """Raise a NALoRAError if a judge is to rate the answers and none is named."""
        if _JUDGE in self.measures and not self.judge.model:
            raise NALoRAError(
                "judge_model",
                found="no judge for measure: judge",
                expected="the name of a model on the server at OPENAI_BASE_URL (OpenAI by default)",
                fix="add judge_model=NAME, or judge_model=null to train now and name the judge when evaluating"
                " (--option judge_model=NAME)",
            )

    def prepare_scoring(self) -> None:
        """Raise a NALoRAError for texts, which have no questions to answer, or if the judge does not answer."""
        if self.reader.format.name == "text":
            raise NALoRAError(
                self.name,
                found="texts without questions",
                expected="questions and answers to generate and score",
                fix="give test data with questions (test: FILE); a study with generate: none reports the loss of texts",
            )
        if _JUDGE in self.measures:
            self.judge.check()

    def score(self, example: Example, outputs: Sequence[str]) -> Scores:
        """Compare the output with the expected answer by every measure."""
        return {name: measure(example, outputs[0]) for name, measure in self._measures.items()}

    def _test_data(self, source: str, test: str | None, share: float | None, every_row: bool) -> ExampleRows:
        if test is not None:
            return self._opened_test(test)
        if share is None and (source.startswith(HUB) or Path(source).is_dir()):
            with contextlib.suppress(NoSplitError):
                return self._opened_test(source)
        if share is None and every_row:
            return self._train
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
            if name not in (*known, _JUDGE):
                raise unknown_name(f"measure: {name}", "no such measure", name, type(self).measures, "choose one")
        targets = [self._test[index].target for index in range(min(200, len(self._test)))]
        names = names or (["regex"] if pattern is not None else list(suitable(targets)))
        chosen: dict[str, Any] = {
            name: lambda example, output, name=name: known[name](output, example.target) for name in names
        }
        return chosen | ({_JUDGE: functools.partial(rated, self.judge)} if _JUDGE in names else {})

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
