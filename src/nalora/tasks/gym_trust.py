"""Which families of reasoning-gym have scorers whose marks mean something, by measurement.

A scorer that gives marks to an answer which nobody would call right measures how models write and not what they know:
coin_flip accepts "0" for nearly every probability. benchmarks/gym_trust.py gives the same trivial answers to every
question of a family, and writes gym_trust.json.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

FILE = Path(__file__).with_suffix(".json")
# What a trivial answer may score above its share of right answers: in full marks, and in the mean of all marks, where
# families give parts of a mark to whatever has the right form.
LARGEST_ACCURACY = 0.1
LARGEST_SCORE = 0.3
# Trivial answers that are named by their own text; the others are described.
LITERAL = ("0", "1", "-1", "nan", "inf", "1e400", "True", "None", "[]", "{}", "qqq")


@dataclass(frozen=True)
class Fault:
    """Why marks of a family cannot be trusted.

    Args:
        measure: "accuracy" where no mark means anything; "score" where full marks do, and parts of a mark do not.
        reason: in words.
    """

    measure: Literal["accuracy", "score"]
    reason: str


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
    return repr(answer) if answer in LITERAL else answer


@functools.cache
def untrusted() -> dict[str, Fault]:
    """Families whose marks cannot be trusted, as they were measured."""
    families = json.loads(FILE.read_text(encoding="utf-8"))["families"]
    return {family: found for family, measured in families.items() if (found := fault(measured)) is not None}
