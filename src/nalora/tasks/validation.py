"""Examples held out of the training set, to choose a learning rate by: the test set is asked once, at the end."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from nalora.errors import NALoRAError
from nalora.tasks.task import Example


def hold_out(examples: Sequence[Example], size: int) -> tuple[list[Example], list[Example]]:
    """(what is learnt from, what is held out), both in their order.

    Which ones are held out depends on their ids alone: the same for every seed, method and machine, and a training
    set that grows keeps nearly all of them.

    Raises:
        NALoRAError: nothing would be left to learn from.
    """
    if size >= len(examples) and size:
        raise NALoRAError(
            f"validation_size: {size}",
            found=f"{len(examples)} training examples",
            expected="fewer held out than there are",
            fix="lower validation_size",
        )
    by_chance = sorted(examples, key=lambda each: hashlib.blake2b(each.id.encode(), digest_size=8).digest())
    held = {each.id for each in by_chance[:size]}
    return [each for each in examples if each.id not in held], [each for each in examples if each.id in held]
