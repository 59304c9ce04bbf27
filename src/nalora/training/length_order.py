"""The order of training examples where those of like length share a batch, so that little of it is pads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.utils.data import Sampler

# Of GSM8K's tokens in random batches of 32 half are pads; sorted within lots of 50 batches, one in twenty.
_BATCHES_IN_A_LOT = 50


class LikeLengths(Sampler[int]):
    """A pass in random order; lots of batches are drawn and sorted, and their batches come in random order.

    The order depends on the seed and the number of the pass alone: a resumed run, or one on more processes, finds it
    again.

    Args:
        lengths: of the examples.
        batch_size: examples of one optimizer step.
        seed: of the draw.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int) -> None:
        self.lengths, self.batch_size, self.seed, self.epoch = lengths, batch_size, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Which pass comes next; asked by the loader."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        # torch takes the lower 32 bits of a seed: another number for each of the first 65,536 seeds and passes.
        generator = torch.Generator().manual_seed((self.seed << 16) + self.epoch)
        drawn = torch.randperm(len(self.lengths), generator=generator).tolist()
        size, lot = self.batch_size, self.batch_size * _BATCHES_IN_A_LOT
        lots = [sorted(drawn[i : i + lot], key=self.lengths.__getitem__) for i in range(0, len(drawn), lot)]
        batches = [each[i : i + size] for each in lots for i in range(0, len(each), size)]
        # What is left over stays last: in the middle it would shift every batch behind it.
        left_over = [batches.pop()] if len(batches[-1]) < size else []
        order = torch.randperm(len(batches), generator=generator).tolist()
        for batch in [*(batches[i] for i in order), *left_over]:
            yield from batch
