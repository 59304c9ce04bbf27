"""Grade-school mathematics: GSM8K's test split; training on MetaMathQA or on GSM8K's own training split."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from nalora.tasks import sources
from nalora.tasks.answers import published, robust, same_number
from nalora.tasks.task import Example, Scores, Task, alpaca

TrainSet = Literal["metamathqa", "gsm8k"]
Prompt = Literal["qa", "alpaca"]

_PROMPTS = {"qa": lambda question: f"Q: {question}\nA: ", "alpaca": alpaca}
_GSM8K = {split: (f"gsm8k/{split}.jsonl", f"{split}.jsonl") for split in ("train", "test")}
_METAMATHQA = tuple(
    folder + file for folder in ("metamathqa/", "") for file in ("MetaMathQA-395K.json", "MetaMathQA.jsonl")
)
# MetaMathQA repeats the number after "####" in this last line.
_REPEATED = re.compile(r"\s*\nThe answer is:")
_CALCULATOR = re.compile(r"<<[^<>]*>>")


class GSM8K(Task):
    """1,319 word problems whose answer is a number, scored with both readers of `nalora.tasks.answers`.

    "accuracy_published" applies the published reader to the reference answer too, as the public evaluation does:
    14 references with commas are cut at them. Unlike there, a text without a number is wrong and is not read as 0,
    which the 2 references with a minus sign would be.

    Args:
        data_dir: a folder with ``gsm8k/{train,test}.jsonl``; by default the hub is used.
        train_set: "metamathqa" is the training set of the published comparisons; "gsm8k" is the training split, and
            the default if data_dir contains it.
        prompt: "qa" is the template ``Q: …`` and ``A: ``, "alpaca" is Alpaca's.
        limit: the number of examples of MetaMathQA, in file order; None uses all that were made from GSM8K.
            The published sets drop long examples before they count, so use None if a length filter follows.
        cut_answer: end MetaMathQA's targets before their last line, "The answer is: …", as LoRA-GA does.
        calculator: keep the ``<<9*2=18>>`` notes in targets of GSM8K, which other work trains on; False removes
            them, for models that should generate plain text.
    """

    name = "gsm8k"
    title = "grade-school math; trains on MetaMathQA or GSM8K's own training set"
    measures = ("accuracy", "accuracy_published")
    max_new_tokens = 512
    # A model that was not trained to stop continues with another question.
    stop = ("\nQ:", "\n### Instruction:")

    def __init__(
        self,
        data_dir: str | Path | None = None,
        train_set: TrainSet | None = None,
        prompt: Prompt = "qa",
        limit: int | None = 100_000,
        cut_answer: bool = False,
        calculator: bool = True,
    ) -> None:
        if train_set is None:
            train_set = "gsm8k" if sources.holds(data_dir, _GSM8K["train"]) else "metamathqa"
        sources.one_of(self.name, "train_set", train_set, ("metamathqa", "gsm8k"))
        sources.one_of(self.name, "prompt", prompt, tuple(_PROMPTS))
        self.data_dir, self.train_set, self.limit = data_dir, train_set, limit
        self.cut_answer, self.calculator = cut_answer, calculator
        self._prompt = _PROMPTS[prompt]

    def train_examples(self) -> Sequence[Example]:
        """Return the chosen training set, in file order."""
        return self._from_metamathqa() if self.train_set == "metamathqa" else self._from_gsm8k("train")

    def test_examples(self) -> Sequence[Example]:
        """Return the test split, in file order."""
        return self._from_gsm8k("test")

    def score(self, example: Example, outputs: Sequence[str]) -> Scores:
        """Return whether the number is right, according to each reader."""
        reference = example.facts["answer"]
        return {
            "accuracy": float(same_number(robust(outputs[0]), robust(reference))),
            "accuracy_published": float(same_number(published(outputs[0]), published(reference))),
        }

    def _from_gsm8k(self, split: str) -> list[Example]:
        where, rows = sources.read_rows(self.name, self.data_dir, _GSM8K[split], "openai/gsm8k", split, "main")
        examples = []
        for index, row in enumerate(rows):
            question, answer = (sources.text(row, name, f"{where}, row {index}") for name in ("question", "answer"))
            target = answer if self.calculator else _CALCULATOR.sub("", answer)
            examples.append(self._example(f"gsm8k-{split}-{index}", question, target, answer))
        return examples

    def _from_metamathqa(self) -> list[Example]:
        where, rows = sources.read_rows(self.name, self.data_dir, _METAMATHQA, "meta-math/MetaMathQA", "train")
        examples: list[Example] = []
        for index, row in enumerate(rows):
            if len(examples) == self.limit:
                break
            # The other half was made from MATH, whose answers are no plain numbers.
            if "GSM" not in sources.text(row, "type", f"{where}, row {index}"):
                continue
            question, answer = (sources.text(row, name, f"{where}, row {index}") for name in ("query", "response"))
            target = _REPEATED.split(answer)[0] if self.cut_answer else answer
            examples.append(self._example(f"metamathqa-{index}", question, target, answer))
        return examples

    def _example(self, id: str, question: str, target: str, answer: str) -> Example:
        # The reference without its reasoning: the text from its mark on, or all of it if it has none.
        facts = {"answer": answer[max(answer.rfind("####"), 0) :]}
        return Example(id, self._prompt(question), target, facts=facts, question=question)


TASKS = (GSM8K,)
