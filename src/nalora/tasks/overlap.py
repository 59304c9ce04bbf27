"""Training examples that are also test questions: found by their text, whatever its case and spacing."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple, TypeVar

from nalora.errors import NALoRAError

Item = TypeVar("Item")


class Kept(NamedTuple):
    """The places of the training examples that are no test questions, and how many others there were."""

    places: list[int]
    dropped: int


def question_key(text: str) -> str:
    """The text by which a question is recognised: copies of data sets differ in spacing and in capital letters."""
    return " ".join(text.casefold().split())


def not_asked(task: str, trained: Sequence[Item], asked: Collection[Item]) -> Kept:
    """The training examples whose key is not among those of the test set.

    Args:
        task: its name.
        trained: a key for each training example, in their order.
        asked: the keys of the test set.

    Raises:
        NALoRAError: nothing would be left to train on.
    """
    known = set(asked)
    places = [place for place, key in enumerate(trained) if key not in known]
    if trained and not places:
        raise NALoRAError(
            task,
            found=f"each of the {len(trained):,} training examples among the {len(asked):,} test questions",
            expected="training examples that the test set does not have",
            fix="give a training file and a test file with different questions",
        )
    return Kept(places, len(trained) - len(places))
