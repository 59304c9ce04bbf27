"""Five GLUE tasks as text to text: MNLI (matched), SST-2, CoLA, QNLI and MRPC, in T5's format."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import sqrt
from pathlib import Path
from typing import ClassVar, Literal

from nalora.errors import NALoRAError
from nalora.tasks import sources
from nalora.tasks.task import Example, Scores, Task

Prompt = Literal["t5", "decoder"]


class GLUE(Task):
    """A sentence or a pair of sentences, and a word for its label.

    "answered" is the share of answers that are one of the label words; any other answer is wrong.
    "mcc" (CoLA) and "f1" (MRPC, of "equivalent") are not means over examples, so `score` does not return them.

    Args:
        data_dir: a folder with the files, or with folders ``NAME`` or ``glue/NAME`` of them; by default the hub.
        prompt: "t5" is T5's format; "decoder" adds a line after which a decoder continues.
    """

    models = ("seq2seq", "causal")
    # Enough for the longest label, "not_entailment", in any vocabulary we know; longer answers are not labels.
    max_new_tokens = 10
    stop = ("\n",)
    measures: tuple[str, ...] = ("accuracy", "answered")
    # T5's words, at the index of the label on the hub.
    labels: tuple[str, ...]
    # The names of the texts in T5's prompts and on the hub, in T5's order.
    texts: tuple[str, ...] = ("sentence",)
    # The columns in files of these texts and of "label", if they have another name.
    file_columns: ClassVar[Mapping[str, str]] = {}
    # Training file and test files of one split of the data, which are concatenated; the first existing pair is used,
    # since another pair may be another split.
    files: tuple[tuple[str, tuple[str, ...]], ...] = (("train.tsv", ("dev.tsv",)),)
    # The columns of files without a header.
    header: tuple[str, ...] | None = None
    # On the hub; its "test" has no labels.
    test_split = "validation"

    def __init__(self, data_dir: str | Path | None = None, prompt: Prompt = "t5") -> None:
        sources.one_of(self.name, "prompt", prompt, ("t5", "decoder"))
        self.data_dir, self.prompt = data_dir, prompt

    def train_examples(self) -> Sequence[Example]:
        """Return the training split, in file order."""
        return self._split("train")

    def test_examples(self) -> Sequence[Example]:
        """Return the hub's validation split, or the labelled test file of a folder, in file order."""
        return self._split("test")

    def score(self, example: Example, outputs: Sequence[str]) -> Scores:
        """Return whether the answer is the label's word, and whether it is any label's word."""
        answer = outputs[0].strip()
        return {"accuracy": float(answer == example.facts["label"]), "answered": float(answer in self.labels)}

    def summarise(self, examples: Sequence[Example], scores: Sequence[Scores]) -> dict[str, float]:
        """Return the means, and the data set's own measure over all answers."""
        own: dict[str, Callable[..., float]] = {"mcc": mcc, "f1": functools.partial(f1, positive=self.labels[1])}

        def measured(name: str) -> float:
            if name not in own:
                return sum(score[name] for score in scores) / len(scores)
            labels = [example.facts["label"] for example in examples]
            return own[name](labels, [self._answer(*pair) for pair in zip(labels, scores, strict=True)])

        return {name: measured(name) for name in self.measures}

    def chance(self, examples: Sequence[Example]) -> dict[str, float]:
        """Return the accuracy of always giving the most frequent label."""
        ((label, count),) = Counter(example.facts["label"] for example in examples).most_common(1)
        return {f"majority class ({label})": count / len(examples)}

    def _answer(self, label: str, scores: Scores) -> str | None:
        """Return the label that was answered; mcc and f1 are used with two labels, so a wrong answer is the other."""
        if scores["accuracy"]:
            return label
        return next(word for word in self.labels if word != label) if scores["answered"] else None

    def _split(self, split: Literal["train", "test"]) -> list[Example]:
        if self.data_dir is None:
            hub_split = "train" if split == "train" else self.test_split
            return self._examples(split, sources.hub_rows(self.name, "nyu-mll/glue", hub_split, self.name), {})
        rows = [row for file in self._files(self.data_dir, split) for row in sources.tsv_rows(file, self.header)]
        if self.name == "mrpc" and split == "train":
            rows = _without_repeated_ids(rows)
        return self._examples(split, rows, self.file_columns)

    def _files(self, data_dir: str | Path, split: Literal["train", "test"]) -> list[Path]:
        """Return the files of a split from the first complete pair; without one, the files of that split alone."""
        train = [name for name, _ in self.files if sources.holds(data_dir, self._paths(name))]
        test = [names[0] for _, names in self.files if sources.holds(data_dir, self._paths(names[0]))]
        complete = [pair for pair in self.files if pair[0] in train and pair[1][0] in test]
        if train and test and not complete:
            raise NALoRAError(
                f"{self.name}, {data_dir}",
                found=f"{' and '.join([*train, *test])}, which may share examples",
                expected=" or ".join(f"{name} with {' and '.join(names)}" for name, names in self.files),
                fix="add the file that belongs to one of them, or remove the other",
            )
        pairs = complete[:1] or self.files
        if split == "train":
            return [sources.find_file(self.name, data_dir, self._paths(*(name for name, _ in pairs)))]
        first = sources.find_file(self.name, data_dir, self._paths(*(names[0] for _, names in pairs)))
        names = next(names for _, names in pairs if names[0] == first.name)
        return [sources.find_file(self.name, first.parent, self._paths(name)) for name in names]

    def _paths(self, *names: str) -> list[str]:
        return [folder + name for name in names for folder in (f"glue/{self.name}/", f"{self.name}/", "")]

    def _examples(self, split: str, rows: sources.Rows, columns: Mapping[str, str]) -> list[Example]:
        examples = []
        for index, row in enumerate(rows):
            where = f"{self.name} {split}, row {index}"
            texts = {name: str(sources.field(row, columns.get(name, name), where)) for name in self.texts}
            label = self._label(str(sources.field(row, columns.get("label", "label"), where)), where)
            question = f"{self.name} " + " ".join(f"{word}: {text.strip()}" for word, text in texts.items())
            # A line break before the label is a token by itself; a space would be part of the label's token.
            prompt = f"{question}\nlabel:\n" if self.prompt == "decoder" else question
            facts = {"label": label}
            examples.append(Example(f"{self.name}-{split}-{index}", prompt, label, facts=facts, question=question))
        return examples

    def _label(self, value: str, where: str) -> str:
        if value.isdecimal() and int(value) < len(self.labels):
            return self.labels[int(value)]
        if value in self.labels:
            return value
        raise NALoRAError(
            where,
            found=f"the label {value!r}",
            expected=f"one of {', '.join(self.labels)} or its number",
            fix="use a split with labels: GLUE keeps those of its test split secret",
        )


def mcc(labels: Sequence[str], answers: Sequence[str | None]) -> float:
    """Return Matthews' correlation of labels and answers; 0 if one of them is constant. None is a separate class."""
    total = len(labels)
    right = sum(label == answer for label, answer in zip(labels, answers, strict=True))
    per_label, per_answer = Counter[str | None](labels), Counter(answers)
    expected = sum(count * per_answer[label] for label, count in per_label.items())
    spread = [total**2 - sum(count**2 for count in counts.values()) for counts in (per_label, per_answer)]
    return (right * total - expected) / sqrt(spread[0] * spread[1]) if all(spread) else 0.0


def f1(labels: Sequence[str], answers: Sequence[str | None], positive: str) -> float:
    """Return the harmonic mean of precision and recall of one label; 0 if it is never right."""
    both = sum(label == answer == positive for label, answer in zip(labels, answers, strict=True))
    either = sum(label == positive for label in labels) + sum(answer == positive for answer in answers)
    return 2 * both / either if either else 0.0


def _without_repeated_ids(rows: sources.Rows) -> sources.Rows:
    """Return MRPC's rows without repeated ids: a public copy has four made-up sentences, all numbered -1.

    The corpus has 4,076 pairs. All rows of a file without ids are used.
    """
    ids = [(row.get("#1 ID"), row.get("#2 ID")) for row in rows]
    count = Counter(ids)
    return [row for row, pair in zip(rows, ids, strict=True) if count[pair] == 1 or not all(pair)]


class MNLI(GLUE):
    """Whether one sentence follows from another."""

    name, title = "mnli", "GLUE's MNLI (matched) as text to text"
    labels = ("entailment", "neutral", "contradiction")
    texts = ("hypothesis", "premise")
    file_columns: ClassVar = {"premise": "sentence1", "hypothesis": "sentence2", "label": "gold_label"}
    files = (("train.tsv", ("dev_matched.tsv",)),)
    test_split = "validation_matched"


class SST2(GLUE):
    """The sentiment of a sentence."""

    name, title = "sst2", "GLUE's SST-2 as text to text"
    labels = ("negative", "positive")


class CoLA(GLUE):
    """Whether a sentence is acceptable."""

    name, title = "cola", "GLUE's CoLA as text to text"
    measures = ("accuracy", "mcc", "answered")
    labels = ("unacceptable", "acceptable")
    # The two test files together are the hub's validation split.
    files = (("in_domain_train.tsv", ("in_domain_dev.tsv", "out_of_domain_dev.tsv")), ("train.tsv", ("dev.tsv",)))
    header = ("source", "label", "mark", "sentence")


class QNLI(GLUE):
    """Whether a sentence answers a question."""

    name, title = "qnli", "GLUE's QNLI as text to text"
    labels = ("entailment", "not_entailment")
    texts = ("question", "sentence")


class MRPC(GLUE):
    """Whether two sentences have the same meaning."""

    name, title = "mrpc", "GLUE's MRPC as text to text"
    measures = ("accuracy", "f1", "answered")
    labels = ("not_equivalent", "equivalent")
    texts = ("sentence1", "sentence2")
    file_columns: ClassVar = {"sentence1": "#1 String", "sentence2": "#2 String", "label": "Quality"}
    # The corpus's own test file; the hub's 408 validation rows are another split, taken from its training file.
    files = (("msr_paraphrase_train.txt", ("msr_paraphrase_test.txt",)), ("train.tsv", ("dev.tsv",)))


TASKS = (MNLI, SST2, CoLA, QNLI, MRPC)
