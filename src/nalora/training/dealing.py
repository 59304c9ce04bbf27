"""How the batches of a pass are dealt to processes, so that all of them together learn what one process learns.

Accelerate deals them in turn, and where they do not come out even it hands the first examples of the pass out again:
they would be learnt twice, and the last step of every pass would be another one than on one process. Here blanks fill
the places instead: rows without a token that counts, which neither the loss nor a gate's statistics see.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import BatchSampler
from transformers import Trainer

from nalora.training.data import Collator

# Where a batch has no example left.
BLANK: None = None


class Filled(BatchSampler):
    """Another sampler's batches, the last ones filled with blanks until every process has a whole one."""

    def __init__(self, batches: BatchSampler, processes: int) -> None:
        super().__init__(batches.sampler, batches.batch_size, drop_last=False)
        self.batches, self.processes = batches, processes

    def __len__(self) -> int:
        return math.ceil(len(self.batches) / self.processes) * self.processes

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            yield [*batch, *[BLANK] * (self.batch_size - len(batch))]
        for _ in range(len(self) - len(self.batches)):
            yield [BLANK] * self.batch_size


class RunTrainer(Trainer):  # type: ignore[misc]
    """A Trainer whose processes share each pass over the data without a remainder."""

    def get_train_dataloader(self) -> Any:
        """Accelerate's, with blanks. Pictures are dealt its way: there is no blank one."""
        loader = super().get_train_dataloader()
        dealt = loader.batch_sampler
        if isinstance(dealt, BatchSamplerShard) and isinstance(self.data_collator, Collator):
            dealt.batch_sampler = Filled(dealt.batch_sampler, dealt.num_processes)
            # A resumed pass looks here for who has to know its number; Accelerate puts only its own sampler there.
            dealt.sampler = dealt.batch_sampler.sampler
        return loader
