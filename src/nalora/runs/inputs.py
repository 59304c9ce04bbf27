"""What a run trains and on what: the model as its task needs it, and the task's training set for it."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.utils.data import Dataset

from nalora.errors import counted
from nalora.methods.method import Adapter
from nalora.models import loading
from nalora.models.loading import Loaded
from nalora.models.positions import check_length, trained_positions
from nalora.runs.encoding import Collator, Encoder, TrainingRows, encode
from nalora.runs.packed_examples import refuse_encoder_decoder, refuse_unless_kept_apart
from nalora.runs.settings import RunSettings
from nalora.tasks import Example, Task, TrainingInputs

# With CUDA graphs batches are padded to multiples of this: each length is captured for itself, within seconds.
_GRAPH_MULTIPLE = 64


def kind_of(task: Task, settings: RunSettings) -> str:
    """Which kind of model the task gets: for a task that several kinds can do, the one this model is."""
    if len(task.models) == 1 or settings.model in loading.NAMED:
        return "causal" if settings.model in loading.NAMED and "causal" in task.models else task.models[0]
    config = loading.read_config(settings.model_spec(task.models[0]))
    if config is None:  # loading says what is wrong, with the fix
        return task.models[0]
    wanted = "seq2seq" if getattr(config, "is_encoder_decoder", False) else "causal"
    return wanted if wanted in task.models else task.models[0]


class RowDataset(Dataset[Any]):
    """Rows of tokens, or pictures, that a Trainer can draw from; a blank where it asks for None."""

    def __init__(self, rows: Sequence[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int | None) -> Any:
        return self.rows[index] if index is not None else None


@dataclass(frozen=True)
class Material:
    """What a run trains, and on what.

    `rows` says which texts were left out for their length, `also_asked` how many examples for being test questions,
    and `not_compared` why nobody knows, where there is no test set.
    """

    model: nn.Module
    dataset: Any
    collator: Any
    adapter: Adapter
    rows: TrainingRows | None = None
    also_asked: int | None = None
    not_compared: str | None = None


def prepare(task: Task, loaded: Loaded, settings: RunSettings) -> Material:
    """The task's training set for this model.

    Raises:
        NALoRAError: the data is not there or does not fit, or is to be packed for a model that mixes what is packed.
    """
    adapter = settings.adapter()
    if adapter.target_modules == "all-linear":
        adapter = replace(adapter, target_modules=task.linear_layers)
    encoded = functools.partial(_encoded, loaded=loaded, settings=settings)
    inputs = task.training_inputs(loaded, settings.validation_size, settings.train_limit, encoded)
    model, dataset = task.prepare_model(loaded).model, RowDataset(inputs.rows)
    return Material(model, dataset, inputs.collator, adapter, inputs.encoded, task.also_asked, task.not_compared)


def _encoded(examples: Sequence[Example], loaded: Loaded, settings: RunSettings) -> TrainingInputs:
    """Texts as rows of tokens, for a model that can read rows of their length."""
    if settings.packing:
        refuse_encoder_decoder(loaded.spec.kind)
        refuse_unless_kept_apart(loaded.model)
    rows = encode(
        examples,
        Encoder(loaded.processor, loaded.spec.kind, settings.prompt_style),
        settings.max_length,
        too_long=settings.too_long,
        packing=settings.packing,
        limit=settings.train_limit,
    )
    multiple = _GRAPH_MULTIPLE if settings.cuda_graphs else 1
    check_length(
        loaded.model,
        math.ceil(rows.longest / multiple) * multiple,
        f"max_length: {settings.max_length}",
        f"set max_length: {{limit}} (with too_long: {settings.too_long})",
    )
    # SDPA gives zeros for a row without any real token; of others some give NaN, and some do not run.
    blank = 0 if settings.attention in (None, "sdpa") else 1
    collate = Collator(loaded.processor.pad_token_id, loaded.spec.kind, multiple, blank)
    return TrainingInputs(rows.rows, collate, rows)


def rows_summary(material: Material) -> dict[str, int | None]:
    """What the result says of the data; None where no test set was there to compare with."""
    rows = material.rows
    if rows is None:
        return {"examples": len(material.dataset), "dropped_also_asked": material.also_asked}
    return {
        "examples": rows.examples,
        "rows": len(rows.rows),
        "dropped_also_asked": material.also_asked,
        "dropped_too_long": rows.dropped,
        "cut_too_long": rows.cut,
        "target_tokens": rows.target_tokens,
    }


def described(material: Material) -> list[str]:
    """What a user should know of the data before training starts."""
    rows = material.rows
    lines = []
    if rows is not None:
        lines.append(
            f"{counted(rows.examples, 'example')} in {counted(len(rows.rows), 'row')},"
            f" {counted(rows.target_tokens, 'token')} to train on"
        )
    if material.also_asked:
        lines.append(f"also in the test set: {counted(material.also_asked, 'example')} left out")
    if material.not_compared:
        lines.append(f"training examples not compared with the test set: {material.not_compared}")
    if rows is None:
        return lines
    if rows.dropped or rows.cut:
        lines.append(f"too long: {counted(rows.dropped, 'example')} left out, {rows.cut:,} cut at the end")
    positions = trained_positions(material.model)
    if positions is not None and rows.longest > positions:
        lines.append(
            f"examples of up to {rows.longest:,} tokens, and a model that was built for {positions:,} positions"
        )
    return lines
