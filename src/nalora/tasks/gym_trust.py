"""Which families of reasoning-gym have scorers whose marks mean something, by measurement.

A scorer that gives marks to an answer which nobody would call right measures how models write and not what they know:
coin_flip accepts "0" for nearly every probability. `measure` gives the same trivial answers to every question of
a family; its results for all families are kept in gym_trust.json, which benchmarks/gym_trust.py writes.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

FILE = Path(__file__).with_suffix(".json")
# Questions of each family; fewer than that would not tell a tenth from nothing.
ITEMS = 25
# What a trivial answer may score above its share of right answers: in full marks, and in the mean of all marks, where
# families give parts of a mark to whatever has the right form.
LARGEST_ACCURACY = 0.1
LARGEST_SCORE = 0.3
QUESTION, OTHER = "the question itself", "the answer to another question"
TRIVIAL: dict[str, str] = {
    "nothing": "",
    "a space": " ",
    **{answer: answer for answer in ("0", "1", "-1", "nan", "inf", "1e400", "True", "None", "[]", "{}", "qqq")},
    "400 digits": "9" * 400,
}


@dataclass(frozen=True)
class Fault:
    """Why marks of a family cannot be trusted.

    Args:
        measure: "accuracy" where no mark means anything; "score" where full marks do, and parts of a mark do not.
        reason: in words.
    """

    measure: Literal["accuracy", "score"]
    reason: str


def measure(family: str, items: int = ITEMS) -> dict[str, Any]:
    """What the family's scorer gives to trivial answers, and to its own.

    Returns:
        `own`: the share of its own answers with a full mark, None where the family knows none; and of the trivial
        answers, the one with the largest `accuracy` above `by_chance`, the share of questions that it is right for, and
        the one with the largest mean `score` above that.

    Raises:
        NALoRAError: the family cannot be drawn.
    """
    from nalora.tasks.gym import Gym

    task = Gym(f"gym/{family}", train_size=1, test_size=items)
    examples = task.test_examples()
    known = [example for example in examples if example.target]
    own = [mark >= 1 for mark in task.marks([(example, example.target) for example in known])]
    rows: list[dict[str, Any]] = []
    for name in (*TRIVIAL, QUESTION, OTHER):
        answers = [TRIVIAL.get(name, "")] * items
        if name == QUESTION:
            answers = [task.question(example) for example in examples]
        elif name == OTHER:
            answers = [examples[index - 1].target for index in range(items)]
        marks = task.marks(list(zip(examples, answers, strict=True)))
        pairs = zip(answers, examples, strict=True)
        by_chance = sum(bool(each.target) and _plain(answer) == _plain(each.target) for answer, each in pairs) / items
        accuracy, score = sum(mark >= 1 for mark in marks) / items, sum(marks) / items
        rows.append({"answer": name, "accuracy": accuracy, "score": round(score, 4), "by_chance": by_chance})
    return {
        "own": round(sum(own) / len(own), 4) if own else None,
        "by_accuracy": max(rows, key=lambda row: row["accuracy"] - row["by_chance"]),
        "by_score": max(rows, key=lambda row: row["score"] - row["by_chance"]),
    }


def fault(measured: dict[str, Any]) -> Fault | None:
    """What is wrong with a family that was measured so; None where nothing is."""
    if measured["own"] is not None and measured["own"] < 1:
        return Fault("accuracy", f"its scorer accepts only {measured['own']:.0%} of its own answers")
    row = measured["by_accuracy"]
    if row["accuracy"] - row["by_chance"] > LARGEST_ACCURACY:
        answer, share = _named(row["answer"]), f"{row['accuracy']:.0%} of its questions"
        return Fault("accuracy", f"its scorer gives a full mark to {answer} for {share}")
    row = measured["by_score"]
    if row["score"] - row["by_chance"] > LARGEST_SCORE:
        return Fault("score", f"its scorer gives {_named(row['answer'])} {row['score']:.2f} of a mark on average")
    return None


def _named(answer: str) -> str:
    return repr(answer) if TRIVIAL.get(answer) == answer else answer


@functools.cache
def untrusted() -> dict[str, Fault]:
    """Families whose marks cannot be trusted, as they were measured."""
    families = json.loads(FILE.read_text(encoding="utf-8"))["families"]
    return {family: found for family, measured in families.items() if (found := fault(measured)) is not None}


def _plain(text: str) -> str:
    return text.strip().lower()
