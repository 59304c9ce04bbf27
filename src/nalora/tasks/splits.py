"""Training, validation and test examples kept apart: no example is in two of them.

Validation examples are held out of the training set, to choose a learning rate; the test set is used once, at the end.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Collection, Hashable, Sequence
from typing import TYPE_CHECKING, TypeVar

from nalora.errors import NALoRAError

if TYPE_CHECKING:
    from nalora.tasks.task import Example

Key = TypeVar("Key")


def question_key(text: str) -> str:
    """Return the text by which a question is compared: copies of data sets differ in spacing and in letter case."""
    return " ".join(text.casefold().split())


def not_in_test(task: str, train: Sequence[Key], test: Collection[Key]) -> list[int]:
    """Return the indices of training examples whose key is not in the test set; raise a NALoRAError if none is left."""
    keys = set(test)
    indices = [index for index, key in enumerate(train) if key not in keys]
    if train and not indices:
        raise NALoRAError(
            task,
            found=f"each of the {len(train):,} training examples among the {len(test):,} test questions",
            expected="training examples that the test set does not have",
            fix="give a training file and a test file with different questions",
        )
    return indices


def hold_out(examples: Sequence[Example], size: int) -> tuple[list[Example], list[Example]]:
    """Return (training examples, held-out examples), both in their order.

    Copies of held-out examples are not trained on: of 400 draws of reasoning-gym's Caesar cipher, 280 are drawn again
    among 10,000. If no training example is left, this raises a NALoRAError.
    """
    # Image examples have no prompt: their content is not compared here.
    texts = [(e.prompt, *e.follow_ups, e.target) if e.prompt else None for e in examples]
    train, held_out = hold_out_indices([example.id for example in examples], size, texts)
    return [examples[index] for index in train], [examples[index] for index in held_out]


def hold_out_indices(ids: Sequence[str], size: int, contents: Sequence[Hashable] = ()) -> tuple[list[int], list[int]]:
    """Return the indices of training examples and of `size` held-out examples, both in their order.

    The choice depends on the ids alone: it is the same for every seed, method and machine, and hardly changes when the
    training set grows. Images are split by their ids without being decoded. With `contents`, training examples whose
    content is held out are left out; None is the content of an example that is not compared.
    """
    if size >= len(ids) and size:
        raise NALoRAError(
            f"validation_size: {size}",
            found=f"{len(ids)} training examples",
            expected="fewer held-out examples than training examples",
            fix="lower validation_size",
        )
    chosen = set(heapq.nsmallest(size, ids, key=lambda id: hashlib.blake2b(id.encode(), digest_size=8).digest()))
    train, held_out = ([i for i, id in enumerate(ids) if (id in chosen) == held] for held in (False, True))
    copies = {contents[index] for index in held_out if contents} - {None}
    distinct = [index for index in train if contents[index] not in copies] if copies else train
    if not distinct and train:
        raise NALoRAError(
            f"validation_size: {size}",
            found=f"{len(train)} further training examples, all of them copies of held-out examples",
            expected="training examples that are not held out",
            fix="lower validation_size",
        )
    return distinct, held_out
