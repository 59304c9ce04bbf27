"""Batches of training examples: the split over processes and passes, their order, a method's first batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, Sampler

from nalora.distributed import processes
from nalora.errors import NALoRAError, counted
from nalora.files import cache_folder
from nalora.methods.method import Batch, Start
from nalora.runs.progress import Report
from nalora.runs.settings import RunSettings

# GSM8K in random batches of 32 has 50 % padding; sorted within 50 batches it has 5 %.
_SORTED_BATCHES = 50


class Split(NamedTuple):
    """The batch of an optimizer step: `accumulated` passes of `micro` examples on each of `processes`."""

    micro: int
    accumulated: int
    processes: int

    def steps(self, examples: int, epochs: float) -> int:
        """Return the number of optimizer steps that the Trainer takes."""
        passes = math.ceil(examples / (self.micro * self.processes))
        return math.ceil(math.ceil(passes / self.accumulated) * epochs)


def split_batch(settings: RunSettings) -> Split:
    """Return how the run's batch is split; raise NALoRAError if the processes or passes do not divide it."""
    count, batch = processes.count(), settings.batch_size
    if batch % count:
        divisors = ", ".join(str(number) for number in range(1, batch + 1) if batch % number == 0)
        raise NALoRAError(
            f"batch_size: {batch}",
            found=f"{count} processes",
            expected=f"a number of them that divides it: {divisors}",
            fix=f"launch one of these numbers, or set batch_size to a multiple of {count}",
        )
    micro = settings.micro_batch_size or batch // count
    if batch % (micro * count):
        raise NALoRAError(
            f"batch_size: {batch}",
            found=f"{count} processes with micro_batch_size {micro}",
            expected="a multiple of their product",
            fix=f"set micro_batch_size to a divisor of {batch // count}",
        )
    return Split(micro, batch // (micro * count), count)


def steps_of(settings: RunSettings, examples: int) -> int:
    """Return the number of optimizer steps of the whole run, over which its learning rate rises and falls."""
    return settings.steps or split_batch(settings).steps(examples, settings.epochs)


def last_step(settings: RunSettings, steps: int) -> int:
    """Return the step after which a run of `steps` steps ends; raise NALoRAError if it ends before `stop_after`."""
    if settings.stop_after is None:
        return steps
    if settings.stop_after >= steps:
        raise NALoRAError(
            f"stop_after: {settings.stop_after}",
            found=f"a run of {counted(steps, 'step')}",
            expected="fewer steps than the run has",
            fix=f"set stop_after to {steps - 1} or less, or remove it" if steps > 1 else "remove it",
        )
    return settings.stop_after


def passes_over(settings: RunSettings, rows: int, steps: int) -> float:
    """Return how many times `steps` optimizer steps train on the data; the last batch of a pass may be incomplete."""
    passes, further = divmod(steps, split_batch(settings).steps(rows, 1))
    return passes + min(1.0, further * settings.batch_size / rows)


def length_notices(settings: RunSettings, rows: int) -> list[str]:
    """Return notices if the run sees only a part of its rows, or trains nothing because its only step is warm-up."""
    steps = steps_of(settings, rows)
    passes = passes_over(settings, rows, steps)
    longer = "raise steps, or set epochs and leave steps out (steps=)" if settings.steps else "raise epochs"
    notices = [f"{passes:.2g} passes over the data: {longer} to train on every row"] if passes < 1 else []
    if steps == 1 and settings.warmup and settings.schedule not in ("constant", "range_test"):
        notices.append("the only step has a learning rate of 0, as warm-up begins there: set warmup=0, or train longer")
    return notices


class FilledBatches(BatchSampler):
    """Another sampler's batches, with None in the last ones so that every process gets the same number of full ones.

    Accelerate would fill them with the first examples of the epoch, which would be trained on twice. None becomes a row
    without a token that counts for the loss or for a gate's statistics.
    """

    def __init__(self, batches: BatchSampler, processes: int) -> None:
        super().__init__(batches.sampler, batches.batch_size, drop_last=False)
        self.batches, self.processes = batches, processes

    def __len__(self) -> int:
        return math.ceil(len(self.batches) / self.processes) * self.processes

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            yield [*batch, *[None] * (self.batch_size - len(batch))]
        for _ in range(len(self) - len(self.batches)):
            yield [None] * self.batch_size


class LikeLengths(Sampler[int]):
    """A random order in which the examples of a batch have similar lengths, which leaves little padding.

    Groups of batches are drawn and sorted, and their batches are shuffled. The order depends only on the seed and the
    epoch: a resumed run, or one on more processes, gets the same. A batch is that of an optimizer step.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int) -> None:
        self.lengths, self.batch_size, self.seed, self.epoch = lengths, batch_size, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Set the next epoch; the data loader calls this."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        # torch uses the lower 32 bits of a seed: a different number for each of the first 65,536 seeds and epochs.
        generator = torch.Generator().manual_seed((self.seed << 16) + self.epoch)
        drawn = torch.randperm(len(self.lengths), generator=generator).tolist()
        size, group = self.batch_size, self.batch_size * _SORTED_BATCHES
        groups = [sorted(drawn[i : i + group], key=self.lengths.__getitem__) for i in range(0, len(drawn), group)]
        batches = [indices[i : i + size] for indices in groups for i in range(0, len(indices), size)]
        # An incomplete batch stays last: in the middle it would shift every batch after it.
        incomplete = [batches.pop()] if len(batches[-1]) < size else []
        order = torch.randperm(len(batches), generator=generator).tolist()
        for batch in [*(batches[i] for i in order), *incomplete]:
            yield from batch


def make_start(
    settings: RunSettings,
    dataset: Any,
    collator: Callable[[list[Any]], dict[str, Any]],
    device: torch.device,
    folder: Path,
    report: Report,
) -> Start:
    """Return what a method gets before the first step: the run's length, its first batches, folders for its files."""
    split = split_batch(settings)
    # A batch is what an optimizer step is trained on, however it is split into passes.
    rows = min(settings.batch_size, len(dataset))
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(settings.seed)).tolist()

    def batches(n: int) -> Iterator[Batch]:
        """Yield this process's part of each batch; all parts together are the batch of a single process."""
        for i in range(n):
            own = [order[(i * rows + j) % len(order)] for j in range(processes.rank(), rows, split.processes)]
            for first in range(0, len(own), split.micro):
                batch = collator([dataset[index] for index in own[first : first + split.micro]])
                yield {name: value.to(device) for name, value in batch.items()}

    return Start(
        seed=settings.seed,
        steps=steps_of(settings, len(dataset)),
        batches=batches,
        passes=math.ceil(math.ceil(rows / split.processes) / split.micro),
        folder=folder,
        cache=cache_folder() / "starts",
        report=report,
    )
