"""The tokens on which states are compared: the first examples of a training set, the same for every state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from nalora import tasks
from nalora.models.loading import Loaded
from nalora.runs.inputs import prepare
from nalora.runs.settings import Run

Batch = dict[str, Any]


@dataclass(frozen=True)
class Probe:
    """Batches on the CPU, the longest examples first, so that what memory it takes is known early."""

    task: str
    examples: int
    batches: list[Batch]


def batches_of(rows: Sequence[Any], collate: Any, size: int) -> list[Batch]:
    """Rows of like length together; models get what they read, and an encoder-decoder what it is to write."""
    ordered = sorted(rows, key=_length, reverse=True)
    batches = [collate(ordered[start : start + size]) for start in range(0, len(ordered), size)]
    # A decoder's labels would only make it compute a loss; an encoder-decoder's are its decoder's tokens.
    drops = getattr(collate, "kind", None) != "seq2seq"
    return [{name: value for name, value in batch.items() if not (drops and name == "labels")} for batch in batches]


def _length(row: Any) -> int:
    return len(row["input_ids"]) if isinstance(row, dict) else 0


def make_probe(
    run: Run, loaded: Loaded, *, size: int, batch_size: int, task: str | None = None, data_dir: str | None = None
) -> tuple[Probe, nn.Module]:
    """The first `size` training examples of the run's own task, or of another, encoded as in training.

    Also the model as the task runs it: a CLIP becomes a classifier of its classes.

    Raises:
        NALoRAError: no such task, or none of its examples fits.
    """
    settings = run.settings
    own = task is None or tasks.resolve(task) == tasks.resolve(settings.task)
    name = settings.task if task is None else task
    options = run.task_options if own else {}
    asked = tasks.get(name, data_dir=data_dir or (settings.data_dir if own else None), **options)
    material = prepare(asked, loaded, replace(settings, train_limit=size, packing=False))
    rows = [material.dataset[i] for i in range(len(material.dataset))]
    return Probe(asked.name, len(rows), batches_of(rows, material.collator, batch_size)), material.model


def on_device(batch: Batch, model: nn.Module) -> Batch:
    """The batch where the model is, and no cache of keys and values, which is for writing."""
    device = next(model.parameters()).device
    moved = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}
    if getattr(getattr(model, "config", None), "use_cache", None) is not None:
        moved["use_cache"] = False
    return moved
