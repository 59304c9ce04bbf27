"""Families of reasoning-gym whose scores are not meaningful, as measured.

A scorer that gives points to an answer nobody would call right measures how a model writes and not what it knows:
coin_flip accepts "0" for nearly every probability. benchmarks/gym_trust.py gives the same trivial answers to every
question of a family and writes gym_trust.json.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any, Literal, NamedTuple

FILE = Path(__file__).with_suffix(".json")
# What a trivial answer may score above its share of right answers: in accuracy, and in the mean score, since some
# families give partial scores to every answer of the right form.
LARGEST_ACCURACY = 0.1
LARGEST_SCORE = 0.3
# Trivial answers that are quoted in messages; the others are described.
LITERAL = ("0", "1", "-1", "nan", "inf", "1e400", "True", "None", "[]", "{}", "qqq")


class Fault(NamedTuple):
    """Why the scores of a family are not meaningful."""

    measure: Literal["accuracy", "score"]  # "accuracy": no score is; "score": full scores are, partial scores are not
    reason: str


def fault(measured: dict[str, Any]) -> Fault | None:
    """Return the fault in a family's row of gym_trust.json, or None."""
    if measured["own"] is not None and measured["own"] < 1:
        return Fault("accuracy", f"its scorer accepts only {measured['own']:.0%} of its own answers")
    row = measured["by_accuracy"]
    if row["accuracy"] - row["by_chance"] > LARGEST_ACCURACY:
        answer, share = _quoted(row["answer"]), f"{row['accuracy']:.0%} of its questions"
        return Fault("accuracy", f"its scorer gives the full score to {answer} for {share}")
    row = measured["by_score"]
    if row["score"] - row["by_chance"] > LARGEST_SCORE:
        return Fault("score", f"its scorer gives {_quoted(row['answer'])} a score of {row['score']:.2f} on average")
    return None


def _quoted(answer: str) -> str:
    return repr(answer) if answer in LITERAL else answer


@functools.cache
def untrusted() -> dict[str, Fault]:
    """Return the faults by family."""
    families = json.loads(FILE.read_text(encoding="utf-8"))["families"]
    faults = {family: fault(measured) for family, measured in families.items()}
    return {family: reason for family, reason in faults.items() if reason is not None}
