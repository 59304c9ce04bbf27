"""The inputs of a training: the model as its task needs it, and the task's training set as batches for that model."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils.data import Dataset

from nalora.errors import counted
from nalora.methods.method import Adapter
from nalora.models import loading
from nalora.models.loading import Kind, Loaded, ModelSpec
from nalora.models.positions import check_length, trained_positions
from nalora.runs.encoding import Collator, Encoder, TrainingRows, encode, refuse_unusable_turns
from nalora.runs.packed_examples import refuse_encoder_decoder, refuse_unless_isolated
from nalora.runs.progress import Report
from nalora.runs.settings import RunSettings
from nalora.tasks import Example, Task, TrainingInputs

# With CUDA graphs batches are padded to multiples of this: each length is captured separately, which takes seconds.
_GRAPH_MULTIPLE = 64


def kind_of(task: Task, spec: ModelSpec) -> Kind:
    """Return the kind of model that the task is trained with: this model's own kind if the task supports several."""
    first: Any = task.models[0]
    kind = loading.model_kind(spec) if len(task.models) > 1 else first
    return kind if kind in task.models else first


def checked_tokenizer(task: Task, spec: ModelSpec, style: str) -> Any:
    """Return the model's tokenizer after checking that its chat template accepts the user's conversations.

    None for tasks that come with nalora. A tokenizer is loaded in a second, weights in up to minutes.

    Raises:
        NALoRAError: turns that the template does not accept, with file and line.
    """
    conversations = list(task.conversations())
    if not conversations:
        return None
    tokenizer = loading.load_processor(spec)
    refuse_unusable_turns(conversations, Encoder(tokenizer, spec.kind, style))
    return tokenizer


class RowDataset(Dataset[Any]):
    """Rows of tokens, or images, for a Trainer; index None returns None, the placeholder for a row."""

    def __init__(self, rows: Sequence[Any]) -> None:
        self.rows = rows

    @property
    def lengths(self) -> Sequence[int]:
        """The number of input tokens of each row, without tokenising it again."""
        known: Sequence[int] | None = getattr(self.rows, "lengths", None)
        return [len(row["input_ids"]) for row in self.rows] if known is None else known

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int | None) -> Any:
        return self.rows[index] if index is not None else None


@dataclass(frozen=True)
class RunInputs:
    """The model to train, its data, and the adapter to add; `rows` is None for data other than text."""

    task: Task
    model: nn.Module
    dataset: RowDataset
    collator: Any
    adapter: Adapter
    rows: TrainingRows | None = None

    def summary(self) -> dict[str, int | None]:
        """Return the entries of result.json about the data; None where there was no test set to compare with."""
        rows, overlap = self.rows, self.task.dropped_test_questions
        if rows is None:
            return {"examples": len(self.dataset), "dropped_also_asked": overlap}
        return {
            "examples": rows.examples,
            "rows": len(rows.rows),
            "dropped_also_asked": overlap,
            "dropped_too_long": rows.dropped,
            "cut_too_long": rows.truncated,
            "target_tokens": rows.target_tokens,
        }

    def notices(self, max_length: int) -> list[str]:
        """Return sentences about the data to print before training."""
        rows, overlap, not_compared = self.rows, self.task.dropped_test_questions, self.task.not_compared
        lines = []
        if rows is not None:
            lines.append(
                f"{counted(rows.examples, 'example')} in {counted(len(rows.rows), 'row')},"
                f" {counted(rows.target_tokens, 'token')} to train on"
            )
        if overlap:
            lines.append(f"also in the test set: {counted(overlap, 'example')} left out")
        if not_compared:
            lines.append(f"training examples not compared with the test set: {not_compared}")
        if rows is None:
            return lines
        if rows.dropped or rows.truncated:
            lines.append(
                f"longer than max_length: {max_length}: {counted(rows.dropped, 'example')} left out,"
                f" {rows.truncated:,} truncated; raise max_length to train on all of them"
            )
        positions = trained_positions(self.model)
        if positions is not None and rows.longest > positions:
            lines.append(
                f"examples of up to {rows.longest:,} tokens, and a model that was built for {positions:,} positions"
            )
        return lines


def prepare(task: Task, loaded: Loaded, settings: RunSettings, report: Report = lambda *progress: None) -> RunInputs:
    """Return the task's training set for this model.

    Raises:
        NALoRAError: the data is missing or does not fit, or is to be packed for a model that mixes packed examples.
    """
    modules = task.linear_layers if settings.target_modules == "all-linear" else settings.target_modules
    adapter = Adapter(settings.rank, settings.alpha, settings.dropout, modules, settings.target_parameters)
    encoded = functools.partial(_encoded, loaded=loaded, settings=settings, report=report)
    inputs = task.training_inputs(loaded, settings.validation_size, settings.train_limit, encoded)
    model = task.prepare_model(loaded).model
    return RunInputs(task, model, RowDataset(inputs.rows), inputs.collator, adapter, inputs.encoded)


def _encoded(examples: Sequence[Example], loaded: Loaded, settings: RunSettings, report: Report) -> TrainingInputs:
    """Return texts as rows of tokens, no longer than the model's positions."""
    if settings.packing:
        refuse_encoder_decoder(loaded.spec.kind)
        refuse_unless_isolated(loaded.model)
    rows = encode(
        examples,
        Encoder(loaded.processor, loaded.spec.kind, settings.prompt_style),
        settings.max_length,
        overlong=settings.overlong,
        packing=settings.packing,
        limit=settings.train_limit,
        report=report,
    )
    multiple = _GRAPH_MULTIPLE if settings.cuda_graphs else 1
    check_length(
        loaded.model,
        math.ceil(rows.longest / multiple) * multiple,
        f"max_length: {settings.max_length}",
        f"set max_length: {{limit}} (with overlong: {settings.overlong})",
    )
    # SDPA returns zeros for a row without real tokens; other implementations return NaN or fail.
    placeholder_mask = 0 if settings.attention in (None, "sdpa") else 1
    collator = Collator(loaded.processor.pad_token_id, multiple, placeholder_mask)
    return TrainingInputs(rows.rows, collator, rows)
