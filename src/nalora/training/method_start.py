"""What a method gets before the first step: the run's length, its first batches, folders for its files."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from nalora.distributed import processes
from nalora.files import cache_folder
from nalora.methods.method import Batch, Start
from nalora.runs.folder import RunFolder
from nalora.runs.progress import Report
from nalora.runs.settings import RunSettings
from nalora.training.batches import split_batch


@contextlib.contextmanager
def start_folder(folder: RunFolder) -> Iterator[None]:
    """Create the folder for a method's start files; remove it at the end if the method wrote none."""
    place = folder.start
    place.mkdir(exist_ok=True)
    yield
    processes.barrier()
    if processes.is_first_process() and place != folder.path:
        with contextlib.suppress(OSError):  # not empty
            place.rmdir()


def make_start(
    settings: RunSettings,
    dataset: Any,
    collator: Callable[[list[Any]], dict[str, Any]],
    device: torch.device,
    folder: Path,
    report: Report,
) -> Start:
    """Return the start of a run on these examples."""
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
        steps=settings.steps or split.steps(len(dataset), settings.epochs),
        batches=batches,
        passes=math.ceil(math.ceil(rows / split.processes) / split.micro),
        folder=folder,
        cache=cache_folder() / "starts",
        report=report,
    )
