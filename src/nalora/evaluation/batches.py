"""Things of like length together: little is spent on pads."""

from __future__ import annotations

from collections.abc import Sequence


def of_like_length(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Places in `lengths`, the longest first, so that what memory it takes is known early.

    Args:
        lengths: tokens of each thing, with the room it needs.
        batch_tokens: of one batch, pads included; a thing that is longer is a batch of its own.
    """
    waiting = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    batches = []
    while waiting:
        size = max(1, batch_tokens // lengths[waiting[0]])
        batches.append(waiting[:size])
        waiting = waiting[size:]
    return batches
