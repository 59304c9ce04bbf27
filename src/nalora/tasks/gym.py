"""Families of reasoning-gym: endless questions with a scorer of their own, learnt from and asked without overlap."""

from __future__ import annotations

import os
import random
import re
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from nalora.errors import NALoRAError, did_you_mean, missing_package, require, wrong_value
from nalora.tasks import gym_trust
from nalora.tasks.isolated_scorer import IsolatedScorer, evaluates_answers
from nalora.tasks.task import Example, Scores, Task

# Item i of a dataset is drawn from its seed + i: seeds 0 and 1 share all items but one. So training and test sets,
# and those of the next seed, start this far apart, and no set may be longer.
_APART = 1_000_000
# NumPy's seeds, which some families use, end at 2³².
_LAST_SEED = 2**32 // (2 * _APART) - 1
# They go through Python sets, whose order changes from process to process. Found by drawing 150 items of every family
# of 0.1.25 under two hash seeds.
_BY_HASH = (
    "intermediate_integration", "isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note",
    "word_ladder",
)  # fmt: skip
# Its programs draw numbers that no seed reaches: 4 of 100 items differ when drawn again.
_UNREPEATABLE = ("codeio",)
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_NONSENSE = "qqq"
_CHECKED = 20

Entry = dict[str, Any]
PREFIX = "gym/"


class Gym(Task):
    """One family: its questions, and what its own scorer says of the whole output, or of its last ``<answer>`` tag.

    "accuracy" is the share of full scores; "score" is the mean, in which families give parts for what is nearly right.

    Args:
        name: ``gym/`` and the family.
        train_size: how many questions are drawn to learn from; those that are also asked are removed then.
        test_size: how many are asked.
        seed: other questions on both sides, sharing none of the draws of another seed.
        settings: the family's own, such as ``{"max_terms": 3}``.
        max_new_tokens: room for the longest answer; some families answer with a page.
        unsafe_code: score without isolation where the family's scorer evaluates what the model writes.

    Raises:
        NALoRAError: no such family or setting, a size or seed out of range, a family that cannot be drawn twice,
            or reasoning-gym is not installed.
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
        self._check("train_size", train_size, 1, _APART)
        self._check("test_size", test_size, 1, _APART)
        self._check("seed", seed, 0, _LAST_SEED)
        self.train_size, self.test_size, self.seed = train_size, test_size, seed
        if not isinstance(settings or {}, Mapping):
            raise wrong_value(
                f"{name}, settings",
                settings,
                "the family's settings by name",
                "write settings={name: value}, as in settings={max_terms: 3}",
            )
        self.settings = dict(settings or {})
        self._check_repeatable()
        self._starts = {"train": 2 * seed * _APART, "test": (2 * seed + 1) * _APART}
        self._datasets = {
            side: self._dataset(size, self._starts[side]) for side, size in (("train", train_size), ("test", test_size))
        }
        self._drawn: dict[tuple[str, int], Entry] = {}
        drawn = {**self.settings, "size": test_size, "seed": self._starts["test"]}
        isolated = evaluates_answers(self._datasets["test"]) and not unsafe_code
        self._scorer = IsolatedScorer(self.name, self.family, drawn, isolated=isolated)

    def notice(self) -> str:
        """That the family's scores cannot be trusted, where that was measured."""
        fault = gym_trust.untrusted().get(self.family)
        if fault is None or fault.measure != "accuracy":
            return ""
        return f"{self.name}: {fault.reason}; training works, its evaluation is refused"

    def training_set(self) -> Sequence[Example]:
        """`train_examples`: they are drawn by text, in which case and spacing count, and leave the test set out."""
        return self.train_examples()

    def train_examples(self) -> Sequence[Example]:
        """Drawn questions, without those of the test set.

        Raises:
            NALoRAError: the family knows no answers, or too few questions for two sets.
        """
        asked = {self._entry("test", index)["question"] for index in range(self.test_size)}
        kept = [index for index in range(self.train_size) if self._entry("train", index)["question"] not in asked]
        self.also_asked = self.train_size - len(kept)
        if not kept:
            raise NALoRAError(
                self.name,
                found=f"each of {self.train_size} drawn questions among the {self.test_size} of the test set",
                expected="some to learn from",
                fix="give settings with more variety, or a smaller test_size",
            )
        if any(self._entry("train", index)["answer"] is None for index in kept):
            raise NALoRAError(
                self.name,
                found="questions without an answer: the family only checks answers",
                expected="answers to learn from",
                fix="learn from another family; this one can be asked",
            )
        return [self._example("train", index) for index in kept]

    def test_examples(self) -> Sequence[Example]:
        """Drawn questions; none of them is learnt from."""
        return [self._example("test", index) for index in range(self.test_size)]

    def score(self, example: Example, outputs: Sequence[str]) -> Scores:
        """The family's own score of the answer, and whether it is the full one."""
        tagged = _TAGGED.findall(outputs[0])
        (score,) = self.marks([(example, (tagged[-1] if tagged else outputs[0]).strip())])
        return {"accuracy": float(score >= 1), "score": score}

    def marks(self, answers: Sequence[tuple[Example, str]]) -> list[float]:
        """The family's own scores of answers, from 0 to 1; 0 for what its scorer cannot read or does not finish."""
        return self._scorer.marks([(answer, self._drawn_for(example)) for example, answer in answers])

    def chance(self, examples: Sequence[Example]) -> dict[str, float]:
        """The accuracy of always giving the commonest answer; nothing where the family knows no answers."""
        ((answer, _),) = Counter(example.target for example in examples).most_common(1)
        if not answer:
            return {}
        full = sum(mark >= 1 for mark in self.marks([(example, answer) for example in examples]))
        return {f"commonest answer ({_short(answer)})": full / len(examples)}

    def prepare_scoring(self) -> None:
        """Refuse a family of `gym_trust`; try its scorer on its own answers, on nonsense, and on one for all questions.

        Raises:
            NALoRAError: its marks cannot be trusted as measured, or with these settings; or it evaluates answers, and
                this machine cannot isolate that.
        """
        fault = gym_trust.untrusted().get(self.family)
        if fault is not None and fault.measure == "accuracy":
            self._refuse(fault.reason)
        if fault is not None:
            warnings.warn(f"nalora: {self.name}: {fault.reason}; compare accuracies and not scores", stacklevel=2)
        examples = self.test_examples()[:_CHECKED]
        known = [example for example in examples if example.target]
        for example, mark in zip(known, self.marks([(each, each.target) for each in known]), strict=True):
            if mark < 1:
                self._refuse(f"its scorer does not accept its own answer {_short(example.target)!r}")
        if any(mark >= 1 for mark in self.marks([(each, _NONSENSE) for each in examples])):
            self._refuse(f"its scorer accepts {_NONSENSE!r}")
        # A few may share a solution by chance; many may not.
        answer = examples[0].target
        others = [(example, answer) for example in examples if example.target != answer]
        if answer and len(others) > 2 and all(mark >= 1 for mark in self.marks(others)):
            self._refuse(f"its scorer accepts {_short(answer)!r} for every question")

    def refuse_what_was_learnt(self, trained: Task) -> None:
        """Each question asked must be one that training left out, which knew the test set of its own options alone.

        A smaller test set begins a larger one in all families of 0.1.25 but acre: so it is the questions that count.

        Raises:
            NALoRAError: some are not: a larger test set, another seed, other settings.
        """
        if not isinstance(trained, Gym):
            return
        mine, theirs = (
            {"test_size": task.test_size, "seed": task.seed, "settings": task.settings} for task in (self, trained)
        )
        if mine == theirs:
            return
        left_out = {trained._entry("test", index)["question"] for index in range(trained.test_size)}
        asked = [self._entry("test", index)["question"] for index in range(self.test_size)]
        others = sum(question not in left_out for question in asked)
        if others:
            changed = [name for name in mine if mine[name] != theirs[name]]
            raise NALoRAError(
                f"{self.name}, " + ", ".join(f"{name}={mine[name]}" for name in changed),
                found=f"{others} of {len(asked)} questions that the run may have learnt from: it was trained with "
                + ", ".join(f"{name}={theirs[name]}" for name in changed),
                expected="only questions that its training left out",
                fix=f"leave {' and '.join(changed)} out, or train a run with the same",
            )

    def _example(self, side: str, index: int) -> Example:
        entry = self._entry(side, index)
        question = f"{entry['question'].rstrip()}\nGive only the answer."
        prompt = f"{question}\nAnswer:\n"
        target = (entry["answer"] or "").strip()
        # Entries hold tuples, which come back from a file of JSON as lists and then score differently: so the draw.
        facts = {"side": side, "index": index}
        return Example(f"{self.family}-{side}-{self.seed}-{index}", prompt, target, facts=facts, question=question)

    def _entry(self, side: str, index: int) -> Entry:
        if (side, index) not in self._drawn:
            # list_functions also draws from Python's global generator, so it is set for the draw and given back.
            state = random.getstate()
            random.seed(self._starts[side] + index)
            try:
                self._drawn[side, index] = self._datasets[side][index]
            finally:
                random.setstate(state)
        return self._drawn[side, index]

    def _drawn_for(self, example: Example) -> Entry:
        return self._entry(example.facts["side"], example.facts["index"])

    def _dataset(self, size: int, seed: int) -> Any:
        try:
            from reasoning_gym.factory import DATASETS, create_dataset
        except ImportError as error:
            raise missing_package(self.name, "reasoning-gym", "to draw questions") from error
        refuse_unknown_family(self.name)
        try:
            return create_dataset(self.family, **self.settings, size=size, seed=seed)
        except (TypeError, ValueError, AssertionError) as error:  # how its configurations refuse
            known = ", ".join(DATASETS[self.family][1].__dataclass_fields__)
            raise NALoRAError(
                f"{self.name}, settings",
                found=f"{self.settings} ({error})",
                expected=f"settings of the family, among {known}",
                fix="see the family's configuration in reasoning-gym; sizes and seed are options of the task",
            ) from error

    def _check(self, option: str, value: int, least: int, most: int) -> None:
        require(least <= value <= most, f"{self.name}, {option}", value, f"{least} to {most}", "give one of these")

    def _check_repeatable(self) -> None:
        if self.family in _UNREPEATABLE:
            self._refuse("it draws other questions each time, so what is asked cannot be kept out of training")
        if self.family in _BY_HASH and os.environ.get("PYTHONHASHSEED", "random") == "random":
            raise NALoRAError(
                self.name,
                found="questions that follow the order of Python sets, which changes with each process",
                expected="the same questions in training and evaluation",
                fix="run every process with PYTHONHASHSEED=0",
            )

    def _refuse(self, found: str) -> None:
        raise NALoRAError(self.name, found=found, expected="a score that can be trusted", fix="use another family")


def refuse_unknown_family(name: str) -> None:
    """Say so before anything is loaded; without reasoning-gym nothing is known of its families.

    Raises:
        NALoRAError: no family of that name.
    """
    known, family = families(), name.partition("/")[2]
    if known and family not in known:
        raise NALoRAError(
            name,
            found=f"no family {family!r}",
            expected=f"one of the {len(known)} of reasoning-gym",
            fix=did_you_mean(family, known, "see reasoning_gym.factory.DATASETS", most=3, cutoff=0.4),
        )


def families() -> list[str]:
    """All that reasoning-gym has; none where it is not installed."""
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError:
        return []
    return list(DATASETS)


def _short(text: str) -> str:
    return text if len(text) <= 30 else f"{text[:29]}…"
