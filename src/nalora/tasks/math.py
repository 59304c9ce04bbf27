"""Grade-school mathematics: GSM8K's test split, learnt from MetaMathQA or from GSM8K's own training split."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from nalora.tasks import sources
from nalora.tasks.answers import published, robust, same_number
from nalora.tasks.prompts import alpaca
from nalora.tasks.task import Example, Scores, Task

TrainSet = Literal["metamathqa", "gsm8k"]
Prompt = Literal["qa", "alpaca"]

_PROMPTS = {"qa": lambda question: f"Q: {question}\nA: ", "alpaca": alpaca}
_GSM8K = {split: (f"gsm8k/{split}.jsonl", f"{split}.jsonl") for split in ("train", "test")}
_METAMATHQA = tuple(
    folder + file for folder in ("metamathqa/", "") for file in ("MetaMathQA-395K.json", "MetaMathQA.jsonl")
)
# Where MetaMathQA repeats the number it has just given after "####".
_REPEATED = re.compile(r"\s*\nThe answer is:")
_CALCULATOR = re.compile(r"<<[^<>]*>>")


class GSM8K(Task):
    """1,319 word problems whose answer is a number, read by two readers of `nalora.tasks.answers` side by side.

    "accuracy_published" applies the published reader to the reference answer too, as the public evaluation does:
    14 references with commas are cut at them. Unlike there, a text without a number is wrong and not 0, which
    the 2 references with a minus sign come to.

    Args:
        data_dir: a folder with ``gsm8k/{train,test}.jsonl``; the hub if it is left out.
        train_set: "metamathqa" is the published comparisons' training set; "gsm8k" is the training split, and the
            default where data_dir holds it.
        prompt: "qa" asks with ``Q: …`` and ``A: ``, "alpaca" with Alpaca's template.
        limit: how many examples of MetaMathQA are used, in file order; None uses all that came from GSM8K.
            The published sets drop long examples before they count, so give None where a length filter follows.
        cut_answer: end MetaMathQA's targets before their last line, "The answer is: …", as LoRA-GA does.
        calculator: keep the ``<<9*2=18>>`` notes in targets of GSM8K. They are part of the file others train on,
            so they stay unless asked; False removes them, for models that should write plain text.

    Raises:
        NALoRAError: a training set or prompt of another name.
    """

    name = "gsm8k"
    title = "grade-school math; trains on MetaMathQA or GSM8K's own training set"
    measures = ("accuracy", "accuracy_published")
    max_new_tokens = 512
    # A model that never learnt to stop goes on with a question of its own.
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
        """The chosen training set, in file order."""
        return self._from_metamathqa() if self.train_set == "metamathqa" else self._from_gsm8k("train")

    def test_examples(self) -> Sequence[Example]:
        """The test split, in file order."""
        return self._from_gsm8k("test")

    def score(self, example: Example, outputs: Sequence[str]) -> Scores:
        """Whether the number is right, as each reader takes it from the text."""
        reference = example.facts["answer"]
        return {
            "accuracy": float(same_number(robust(outputs[0]), robust(reference))),
            "accuracy_published": float(same_number(published(outputs[0]), published(reference))),
        }

    def _from_gsm8k(self, split: str) -> list[Example]:
        where, rows = sources.read_rows(self.name, self.data_dir, _GSM8K[split], "openai/gsm8k", split, "main")
        examples = []
        for index, row in enumerate(rows):
            answer = sources.text(row, "answer", f"{where}, row {index}")
            target = answer if self.calculator else _CALCULATOR.sub("", answer)
            question = sources.text(row, "question", f"{where}, row {index}")
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
            answer = sources.text(row, "response", f"{where}, row {index}")
            target = _REPEATED.split(answer)[0] if self.cut_answer else answer
            question = sources.text(row, "query", f"{where}, row {index}")
            examples.append(self._example(f"metamathqa-{index}", question, target, answer))
        return examples

    def _example(self, id: str, question: str, target: str, answer: str) -> Example:
        facts = {"answer": _conclusion(answer)}
        return Example(id, self._prompt(question), target, facts=facts, question=question)


def _conclusion(answer: str) -> str:
    """The reference without the way there: what follows its mark, or all of it where it has none."""
    return answer[max(answer.rfind("####"), 0) :]


TASKS = (GSM8K,)
