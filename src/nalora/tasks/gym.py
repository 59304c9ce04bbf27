"""Families of reasoning-gym: generated questions with a scorer per family, and separate training and test sets."""

from __future__ import annotations

import functools
import json
import os
import random
import re
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

from nalora.errors import NALoRAError, did_you_mean, missing_package, require, shortened
from nalora.tasks.isolated_scorer import IsolatedScorer, evaluates_answers
from nalora.tasks.task import Example, Scores, Task

# Item i of a dataset is generated from its seed + i: seeds 0 and 1 share all items but one. So training and test sets,
# and those of the next seed, start this far apart, and no set may be longer.
_APART = 1_000_000
# NumPy's seeds, which some families use, end at 2³².
_LAST_SEED = 2**32 // (2 * _APART) - 1
# These families iterate over Python sets, whose order changes from process to process. Measured by generating 150
# items of every family of 0.1.25 under two hash seeds.
_BY_HASH = (
    "intermediate_integration", "isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note",
    "word_ladder",
)  # fmt: skip
# Its programs use random numbers that no seed controls: 4 of 100 items differ when generated again.
_UNREPEATABLE = ("codeio",)
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_NONSENSE = "qqq"
_CHECKED = 20
# Written by benchmarks/gym_trust.py, which gives the same trivial answers to every question of every family: a scorer
# that gives points to them measures how a model writes and not what it knows. coin_flip accepts "0" nearly always.
TRUST_FILE = Path(__file__).with_name("gym_trust.json")
# What a trivial answer may score above its share of right answers: in accuracy, and in the mean score, since some
# families give partial scores to every answer of the right form.
_LARGEST_ACCURACY = 0.1
_LARGEST_SCORE = 0.3
# Trivial answers that are quoted in messages; the others are described.
LITERAL = ("0", "1", "-1", "nan", "inf", "1e400", "True", "None", "[]", "{}", "qqq")

Entry = dict[str, Any]
PREFIX = "gym/"


class Gym(Task):
    """One family, with its scorer applied to the whole output, or to its last ``<answer>`` tag.

    "accuracy" is the share of full scores; "score" is the mean score, which includes partial scores.

    Args:
        name: ``gym/`` and the family.
        train_size: number of training questions to generate; those that are in the test set are then removed.
        test_size: number of test questions.
        seed: a different seed generates different questions for both sets.
        settings: settings of the family, such as ``{"max_terms": 3}``.
        max_new_tokens: room for the longest answer; some families answer with a page.
        unsafe_code: score without isolation where the family's scorer evaluates the model's answers.

    Raises:
        NALoRAError: an unknown family or setting, a size or seed out of range, a family whose questions cannot be
            reproduced, or reasoning-gym is not installed.
    """

    name = "gym/FAMILY"
    title = "any family of reasoning-gym, with its own scorer; no network"
    measures = ("accuracy", "score")
    models = ("causal", "seq2seq")

    def __init__(
        self,
        name: str,
        train_size: int = 5_000,
        test_size: int = 500,
        seed: int = 0,
        settings: Mapping[str, Any] | None = None,
        max_new_tokens: int = 256,
        unsafe_code: bool = False,
    ) -> None:
        self.name, self.family = name, name.partition("/")[2]
        self.max_new_tokens = max_new_tokens
        ranges = (("train_size", train_size, 1, _APART), ("test_size", test_size, 1, _APART))
        for option, value, least, most in (*ranges, ("seed", seed, 0, _LAST_SEED)):
            require(least <= value <= most, f"{name}, {option}", value, f"{least} to {most}", "choose one of these")
        self.train_size, self.test_size, self.seed = train_size, test_size, seed
        if not isinstance(settings or {}, Mapping):
            self._refuse(repr(settings), "the family's settings by name", "write settings={max_terms: 3}", "settings")
        self.settings = dict(settings or {})
        if self.family in _UNREPEATABLE:
            self._refuse("it generates other questions each time, so test questions cannot be kept out of training")
        if self.family in _BY_HASH and os.environ.get("PYTHONHASHSEED", "random") == "random":
            found = "questions that depend on the order of Python sets, which changes with each process"
            expected, fix = "the same questions in training and evaluation", "run every process with PYTHONHASHSEED=0"
            self._refuse(found, expected, fix)
        self._starts = {"train": 2 * seed * _APART, "test": (2 * seed + 1) * _APART}
        sizes = {"train": train_size, "test": test_size}
        self._datasets = {side: self._dataset(sizes[side], start) for side, start in self._starts.items()}
        self._entries: dict[tuple[str, int], Entry] = {}
        options = {**self.settings, "size": test_size, "seed": self._starts["test"]}
        isolated = evaluates_answers(self._datasets["test"]) and not unsafe_code
        self._scorer = IsolatedScorer(self.name, self.family, options, isolated=isolated)

    def notice(self) -> str:
        """Return a notice if the family's scores are not meaningful."""
        fault = untrusted().get(self.family)
        if fault is None or fault.measure != "accuracy":
            return ""
        return f"{self.name}: {fault.reason}; training works, its evaluation is refused"

    def training_set(self) -> Sequence[Example]:
        """Return `train_examples`, which already exclude the test set by their exact text."""
        return self.train_examples()

    def train_examples(self) -> Sequence[Example]:
        """Return the generated training questions without those of the test set; refuse a family without answers."""
        in_test_set = set(self._questions("test"))
        indices = [index for index, text in enumerate(self._questions("train")) if text not in in_test_set]
        self.dropped_test_questions = self.train_size - len(indices)
        if not indices:
            found = f"each of {self.train_size} generated questions among the {self.test_size} of the test set"
            self._refuse(found, "some to train on", "choose settings with more variety, or a smaller test_size")
        if any(self._entry("train", index)["answer"] is None for index in indices):
            found = "questions without an answer: the family only checks answers"
            self._refuse(found, "answers to train on", "train on another family; this one can be evaluated")
        return [self._example("train", index) for index in indices]

    def test_examples(self) -> Sequence[Example]:
        """Return the generated test questions, none of which is trained on."""
        return [self._example("test", index) for index in range(self.test_size)]

    def score(self, example: Example, outputs: Sequence[str]) -> Scores:
        """Return the family's score of the answer, and whether it is the full one."""
        tagged = _TAGGED.findall(outputs[0])
        (score,) = self.scores([(example, (tagged[-1] if tagged else outputs[0]).strip())])
        return {"accuracy": float(score >= 1), "score": score}

    def scores(self, answers: Sequence[tuple[Example, str]]) -> list[float]:
        """Return the family's scores of answers, from 0 to 1; 0 if its scorer cannot read one or takes too long."""
        return self._scorer.scores([(answer, self._entry_of(example)) for example, answer in answers])

    def chance(self, examples: Sequence[Example]) -> dict[str, float]:
        """Return the accuracy of always giving the commonest answer; empty if the family provides no answers."""
        ((answer, _),) = Counter(example.target for example in examples).most_common(1)
        if not answer:
            return {}
        full = sum(score >= 1 for score in self.scores([(example, answer) for example in examples]))
        return {f"commonest answer ({shortened(answer, 30)})": full / len(examples)}

    def prepare_scoring(self) -> None:
        """Check the family's scorer with its own answers, with nonsense, and with one answer to all questions.

        Raises a NALoRAError if its scores are not meaningful, as measured or with these settings, or if it evaluates
        answers and this machine cannot isolate that.
        """
        fault = untrusted().get(self.family)
        if fault is not None and fault.measure == "accuracy":
            self._refuse(fault.reason)
        if fault is not None:
            warnings.warn(f"nalora: {self.name}: {fault.reason}; compare accuracies and not scores", stacklevel=2)
        examples = self.test_examples()[:_CHECKED]
        known = [(example, example.target) for example in examples if example.target]
        for (_, target), score in zip(known, self.scores(known), strict=True):
            if score < 1:
                self._refuse(f"its scorer does not accept its own answer {shortened(target, 30)!r}")
        if any(score >= 1 for score in self.scores([(example, _NONSENSE) for example in examples])):
            self._refuse(f"its scorer accepts {_NONSENSE!r}")
        # A few questions may share a solution by chance; many may not.
        answer = examples[0].target
        others = [(example, answer) for example in examples if example.target != answer]
        if answer and len(others) > 2 and all(score >= 1 for score in self.scores(others)):
            self._refuse(f"its scorer accepts {shortened(answer, 30)!r} for every question")

    def refuse_training_examples(self, trained: Task) -> None:
        """Refuse test questions that training did not exclude, since it excluded the test set of its own options only.

        Compares the questions: a smaller test set is the start of a larger one in all families of 0.1.25 but acre.
        """
        if not isinstance(trained, Gym):
            return
        options = ("test_size", "seed", "settings")
        changed = [name for name in options if getattr(self, name) != getattr(trained, name)]
        if not changed:
            return
        excluded = set(trained._questions("test"))
        others = sum(question not in excluded for question in self._questions("test"))
        if others:
            mine, theirs = (", ".join(f"{name}={getattr(task, name)}" for name in changed) for task in (self, trained))
            found = f"{others} of {self.test_size} questions that the run, with {theirs}, may have been trained on"
            fix = f"leave {' and '.join(changed)} out, or train a run with the same"
            self._refuse(found, "only questions that its training excluded", fix, mine)

    def _example(self, side: str, index: int) -> Example:
        entry = self._entry(side, index)
        question = f"{entry['question'].rstrip()}\nGive only the answer."
        target = (entry["answer"] or "").strip()
        # Not the entry itself: its tuples would be read from a JSON file as lists, which score differently.
        facts = {"side": side, "index": index}
        name = f"{self.family}-{side}-{self.seed}-{index}"
        return Example(name, f"{question}\nAnswer:\n", target, facts=facts, question=question)

    def _questions(self, side: str) -> list[str]:
        size = self.train_size if side == "train" else self.test_size
        return [self._entry(side, index)["question"] for index in range(size)]

    def _entry(self, side: str, index: int) -> Entry:
        if (side, index) not in self._entries:
            # list_functions also uses Python's global random generator: set it, and restore it afterwards.
            state = random.getstate()
            random.seed(self._starts[side] + index)
            try:
                self._entries[side, index] = self._datasets[side][index]
            finally:
                random.setstate(state)
        return self._entries[side, index]

    def _entry_of(self, example: Example) -> Entry:
        return self._entry(example.facts["side"], example.facts["index"])

    def _dataset(self, size: int, seed: int) -> Any:
        if not families():
            raise missing_package(self.name, "reasoning-gym", "to generate questions")
        refuse_unknown_family(self.name)
        from reasoning_gym.factory import DATASETS, create_dataset

        try:
            return create_dataset(self.family, **self.settings, size=size, seed=seed)
        except (TypeError, ValueError, AssertionError) as error:  # how its configurations refuse settings
            expected = f"settings of the family, among {', '.join(DATASETS[self.family][1].__dataclass_fields__)}"
            fix = "see the family's configuration in reasoning-gym; sizes and seed are options of the task"
            self._refuse(f"{self.settings} ({error})", expected, fix, "settings")

    def _refuse(
        self, found: str, expected: str = "meaningful scores", fix: str = "use another family", option: str = ""
    ) -> NoReturn:
        where = f"{self.name}, {option}" if option else self.name
        raise NALoRAError(where, found=found, expected=expected, fix=fix)


def refuse_unknown_family(name: str) -> None:
    """Raise a NALoRAError for an unknown ``gym/`` family; accept every family if reasoning-gym is not installed."""
    known, family = families(), name.partition("/")[2]
    if known and family not in known:
        raise NALoRAError(
            name,
            found=f"no family {family!r}",
            expected=f"one of the {len(known)} of reasoning-gym",
            fix=did_you_mean(family, known, "see reasoning_gym.factory.DATASETS", most=3, cutoff=0.4),
        )


def families() -> list[str]:
    """Return all families of reasoning-gym; empty if it is not installed."""
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError:
        return []
    return list(DATASETS)


class Fault(NamedTuple):
    """Why the scores of a family are not meaningful."""

    measure: Literal["accuracy", "score"]  # "accuracy": no score is; "score": full scores are, partial scores are not
    reason: str


def fault(measured: dict[str, Any]) -> Fault | None:
    """Return the fault in a family's row of gym_trust.json, or None."""
    if measured["own"] is not None and measured["own"] < 1:
        return Fault("accuracy", f"its scorer accepts only {measured['own']:.0%} of its own answers")
    row = measured["by_accuracy"]
    if row["accuracy"] - row["by_chance"] > _LARGEST_ACCURACY:
        answer, share = _quoted(row["answer"]), f"{row['accuracy']:.0%} of its questions"
        return Fault("accuracy", f"its scorer gives the full score to {answer} for {share}")
    row = measured["by_score"]
    if row["score"] - row["by_chance"] > _LARGEST_SCORE:
        return Fault("score", f"its scorer gives {_quoted(row['answer'])} a score of {row['score']:.2f} on average")
    return None


def _quoted(answer: str) -> str:
    return repr(answer) if answer in LITERAL else answer


@functools.cache
def untrusted() -> dict[str, Fault]:
    """Return the faults by family."""
    families = json.loads(TRUST_FILE.read_text(encoding="utf-8"))["families"]
    faults = {family: fault(measured) for family, measured in families.items()}
    return {family: reason for family, reason in faults.items() if reason is not None}
