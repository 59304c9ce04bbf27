"""What a method gets before the first step: the run's length, its first batches, places to keep things."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from nalora import processes
from nalora.cache import cache_folder
from nalora.methods.method import Batch, Start
from nalora.progress import Report
from nalora.training.settings import RunSettings
from nalora.training.trainer import split_batch


def make_start(
    settings: RunSettings,
    dataset: Any,
    collator: Callable[[list[Any]], dict[str, Any]],
    device: torch.device,
    folder: Path,
    report: Report,
) -> Start:
    """The start of a run on these examples."""
    split = split_batch(settings)
    rows = min(split.micro * split.processes, len(dataset))
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(settings.seed)).tolist()

    def batches(n: int) -> Iterator[Batch]:
        """Of each batch this process takes every so many-th row, so that all of them together are one process's."""
        for i in range(n):
            wanted = [order[(i * rows + j) % len(order)] for j in range(processes.rank(), rows, split.processes)]
            if wanted:
                batch = collator([dataset[index] for index in wanted])
                yield {name: value.to(device) for name, value in batch.items()}

    return Start(
        seed=settings.seed,
        steps=settings.steps or split.steps(len(dataset), settings.epochs),
        batches=batches,
        folder=folder,
        cache=cache_folder() / "starts",
        report=report,
    )
