"""Examples held out of the training set, to choose a learning rate by: the test set is asked once, at the end."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from nalora.errors import NALoRAError

if TYPE_CHECKING:
    from nalora.tasks.task import Example


def hold_out(examples: Sequence[Example], size: int) -> tuple[list[Example], list[Example]]:
    """(what is learnt from, what is held out), both in their order.

    A copy of what is held out is not learnt from: of 400 draws of reasoning-gym's Caesar cipher 280 are drawn again
    among 10,000.

    Raises:
        NALoRAError: nothing would be left to learn from.
    """
    learnt, held = ([examples[place] for place in places] for places in split_places([e.id for e in examples], size))
    copies = {_text(each) for each in held if each.prompt}
    others = [each for each in learnt if _text(each) not in copies]
    if not others:
        raise NALoRAError(
            f"validation_size: {size}",
            found=f"{len(learnt)} further training examples, all of them copies of what is held out",
            expected="examples to learn from that are not held out",
            fix="lower validation_size",
        )
    return others, held


def _text(example: Example) -> tuple[str, ...]:
    """All that is learnt from an example; what a picture shows is not in it, and its prompt is empty."""
    return (example.prompt, *example.follow_ups, example.target)


def split_places(ids: Sequence[str], size: int) -> tuple[list[int], list[int]]:
    """The places of what is learnt from and of what is held out, both in their order.

    Which ones are held out depends on their ids alone: the same for every seed, method and machine, and a training
    set that grows keeps nearly all of them. Pictures are split by this without being decoded.

    Raises:
        NALoRAError: nothing would be left to learn from.
    """
    if size >= len(ids) and size:
        raise NALoRAError(
            f"validation_size: {size}",
            found=f"{len(ids)} training examples",
            expected="fewer held out than there are",
            fix="lower validation_size",
        )
    by_chance = sorted(ids, key=lambda each: hashlib.blake2b(each.encode(), digest_size=8).digest())
    held = set(by_chance[:size])
    places = range(len(ids))
    return [place for place in places if ids[place] not in held], [place for place in places if ids[place] in held]
