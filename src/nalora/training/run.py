"""Train one run: load, prepare, train with `transformers.Trainer`, save an ordinary adapter."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn
from torch.utils.data import Dataset

from nalora import processes, tasks
from nalora.methods.method import Adapter
from nalora.models import loading
from nalora.models.loading import Loaded
from nalora.processes import is_first_process
from nalora.progress import bars
from nalora.tasks import Task
from nalora.tasks.images import ImageTask
from nalora.tasks.validation import hold_out
from nalora.training.callbacks import GracefulStop, ProgressBar, RunRecord
from nalora.training.data import Collator, Encoder, TrainingRows, encode
from nalora.training.folder import RunFolder
from nalora.training.settings import Run, RunSettings
from nalora.training.snapshots import GateRecord, Snapshots
from nalora.training.start import make_start
from nalora.training.trainer import make_trainer


class Interrupted(Exception):  # noqa: N818 - not an error: the user asked for it
    """The run was stopped at a step from which it can be resumed."""


def train(run: Run, *, resume: bool = False, console: Console | None = None) -> dict[str, Any]:
    """Train, save, and give what `result.json` says.

    Raises:
        NALoRAError: something is not there, or the folder holds another run.
        Interrupted: stopped by Ctrl-C, with a checkpoint.
    """
    settings = run.settings
    processes.meet(settings.device or loading.best_device())
    console = console if console and is_first_process() else Console(quiet=True)
    folder = RunFolder(settings.output or "runs/run")
    checkpoint = folder.open(run.to_dict(), resume=resume)
    if resume and folder.result.is_file():
        console.print(f"{folder.path} is already finished", highlight=False)
        return _read_result(folder)
    task = tasks.get(settings.task, data_dir=settings.data_dir, **run.task_options)
    with console.status(f"loading {settings.model}"):
        loaded = loading.load(settings.model_spec(kind_of(task, settings)))
    material = prepare(task, loaded, settings)
    for line in described(material.rows):
        console.print(line, highlight=False)
    config: Any = getattr(material.model, "config", None)
    caching = getattr(config, "use_cache", None)
    if caching:
        # A cache of keys and values is for writing; with one, transformers does not keep packed examples apart.
        config.use_cache = False
    with bars(console, transient=True) as report:
        start = make_start(settings, material.dataset, material.collator, loaded.device, folder.path, report)
        model = run.method.prepare(material.model.train(), material.adapter, start)
    stop, bar = GracefulStop(), ProgressBar(console, run.method.title)
    trainer = make_trainer(settings, model, material.dataset, material.collator, [RunRecord(folder), stop, bar])
    trainer.optimizer = run.method.optimizer(trainer)
    run.method.attach(trainer)
    folder.forget_after(_step_of(checkpoint))
    _keep_records(run, trainer, folder, loaded.model, material)
    began = time.perf_counter()
    try:
        outcome = trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    finally:
        bar.close()
        stop.stop_listening()
    if stop.asked and trainer.state.global_step < trainer.state.max_steps:
        raise Interrupted(f"stopped after step {trainer.state.global_step}; go on with --resume")
    result = {
        "method": run.method.name,
        "model": settings.model,
        "task": settings.task,
        "steps": trainer.state.global_step,
        "train_loss": outcome.training_loss,
        "trainable_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "seconds": round(time.perf_counter() - began, 2),
        "peak_memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 3) if torch.cuda.is_available() else None,
        **rows_summary(material),
    }
    if trainer.is_world_process_zero():
        if caching:
            config.use_cache = caching
        if run.method.trains_the_model:
            run.method.save(loaded.model, folder.model)
            loaded.processor.save_pretrained(folder.model)
        else:
            run.method.save(model, folder.adapter)
        folder.finish(result)
    return result


def _keep_records(run: Run, trainer: Any, folder: RunFolder, whole: nn.Module, material: Material) -> None:
    """What is recorded of the gates while the run goes on."""
    settings = run.settings
    if (controller := getattr(trainer, "nalora_controller", None)) is not None:
        trainer.add_callback(GateRecord(folder, controller))
    if settings.snapshot_every:
        trained = whole if run.method.trains_the_model else trainer.model
        trainer.add_callback(Snapshots(folder, settings.snapshot_every, run.method, trained, controller))
    if settings.diagnose_every:
        # Not above: what compares checkpoints is built on top of runs, and few runs ask for it.
        from nalora.diagnostics.online import OnlineDiagnosis

        trainer.add_callback(OnlineDiagnosis(folder, run, material, controller))


def kind_of(task: Task, settings: RunSettings) -> str:
    """Which kind of model the task gets: for a task that several kinds can do, the one this model is."""
    if len(task.models) == 1 or settings.model in loading.NAMED:
        return "causal" if settings.model in loading.NAMED and "causal" in task.models else task.models[0]
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(settings.model, trust_remote_code=settings.trust_remote_code)
    except (OSError, ValueError):  # loading says what is wrong, with the fix
        return task.models[0]
    wanted = "seq2seq" if getattr(config, "is_encoder_decoder", False) else "causal"
    return wanted if wanted in task.models else task.models[0]


class RowDataset(Dataset[Any]):
    """Rows of tokens, or pictures, that a Trainer can draw from."""

    def __init__(self, rows: Sequence[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


@dataclass(frozen=True)
class Material:
    """What a run trains, and on what; `rows` says what was left out, for text."""

    model: nn.Module
    dataset: Any
    collator: Any
    adapter: Adapter
    rows: TrainingRows | None = None


def prepare(task: Task, loaded: Loaded, settings: RunSettings) -> Material:
    """The task's training set for this model."""
    adapter = settings.adapter()
    if isinstance(task, ImageTask):
        from nalora.tasks import clip

        if adapter.target_modules == "all-linear":
            adapter = replace(adapter, target_modules=clip.TARGET_MODULES)
        pictures: Sequence[Any] = task.train_images()
        if settings.train_limit:
            pictures = pictures[: settings.train_limit]
        collator = clip.PictureCollator(loaded.processor.image_processor)
        return Material(clip.classifier(loaded, task).model, RowDataset(pictures), collator, adapter)
    encoder = Encoder(loaded.processor, loaded.spec.kind, settings.prompt_style)
    rows = encode(
        hold_out(task.train_examples(), settings.validation_size)[0],
        encoder,
        settings.max_length,
        too_long=settings.too_long,
        packing=settings.packing,
        limit=settings.train_limit,
    )
    collate = Collator(loaded.processor.pad_token_id, loaded.spec.kind)
    return Material(loaded.model, RowDataset(rows.rows), collate, adapter, rows)


def rows_summary(material: Material) -> dict[str, int]:
    """What the result says of the data."""
    rows = material.rows
    if rows is None:
        return {"examples": len(material.dataset)}
    return {
        "examples": rows.examples,
        "rows": len(rows.rows),
        "dropped_too_long": rows.dropped,
        "cut_too_long": rows.cut,
        "target_tokens": rows.target_tokens,
    }


def described(rows: TrainingRows | None) -> list[str]:
    """What a user should know of the data before training starts."""
    if rows is None:
        return []
    lines = [f"{rows.examples:,} examples in {len(rows.rows):,} rows, {rows.target_tokens:,} tokens to learn"]
    if rows.dropped or rows.cut:
        lines.append(f"too long: {rows.dropped:,} examples left out, {rows.cut:,} cut at the end")
    return lines


def _step_of(checkpoint: Path | None) -> int:
    return int(checkpoint.name.rpartition("-")[2]) if checkpoint else 0


def _read_result(folder: RunFolder) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(folder.result.read_text(encoding="utf-8"))
    return result
