"""Train one run: load, prepare, train with `transformers.Trainer`, save an ordinary adapter."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import torch
from rich.console import Console
from torch import nn

from nalora import tasks
from nalora.distributed import processes
from nalora.distributed.processes import is_first_process
from nalora.errors import NALoRAError
from nalora.models import loading
from nalora.models.attention import without_cache
from nalora.models.compatibility import resolve_device
from nalora.models.loading import Loaded
from nalora.runs import loggers
from nalora.runs.diverged import Diverged, advice
from nalora.runs.folder import RunFolder
from nalora.runs.inputs import Material, described, kind_of, prepare, rows_summary
from nalora.runs.progress import bars
from nalora.runs.saved_run import refuse_diverged
from nalora.runs.settings import Run, RunSettings
from nalora.training import liger
from nalora.training.callbacks import GracefulStop, ProgressBar, RunRecord
from nalora.training.checkpointing import SaveTimes
from nalora.training.claim import Claim, claimed, step_of
from nalora.training.divergence import DivergenceWatch
from nalora.training.method_start import make_start, start_folder
from nalora.training.snapshots import GateRecord, Snapshots
from nalora.training.trainer import make_trainer


class Interrupted(Exception):  # noqa: N818 - not an error: the user asked for it
    """The run was stopped at a step from which it can be resumed."""


def train(run: Run, *, resume: bool = False, take_over: bool = False, console: Console | None = None) -> dict[str, Any]:
    """Train, save, and give what `result.json` says.

    Args:
        run: what to train.
        resume: whether the run in its folder goes on.
        take_over: whether the folder is taken over from a process on another host, which must not run any more.
        console: for progress and messages.

    Raises:
        NALoRAError: something is not there, or the folder holds another run, files of somebody else's, or a process
            that is at work in it.
        Interrupted: stopped by Ctrl-C, with a checkpoint.
        Diverged: loss or gradients stayed non-finite, in this training or in the finished one that is to be resumed.
    """
    settings = run.settings
    device = resolve_device(settings.device)
    loggers.refuse_missing(settings.report_to)
    processes.init_process_group(device)
    console = console if console and is_first_process() else Console(quiet=True)
    folder = RunFolder(settings.output or "runs/run")
    with claimed(folder, run, resume=resume, device=device, take_over=take_over) as claim:
        if resume and folder.result.is_file():
            refuse_diverged(folder, settings)
            result = _read_result(folder)
            console.print(f"{folder.path} is already finished", highlight=False)
            return result
        for line in claim.notices:
            console.print(line, highlight=False)
        task = tasks.get(settings.task, data_dir=settings.data_dir, **run.task_options)
        if notice := task.notice():
            console.print(notice, highlight=False)
        with console.status(f"loading {settings.model}"):
            loaded = loading.load(settings.model_spec(kind_of(task, settings)))
        material = prepare(task, loaded, settings)
        for line in described(material):
            console.print(line, highlight=False)
        with liger.contained(loaded.model) if settings.liger else contextlib.nullcontext():
            return _train(run, loaded, material, folder, claim, console)


def _train(
    run: Run, loaded: Loaded, material: Material, folder: RunFolder, claim: Claim, console: Console
) -> dict[str, Any]:
    with without_cache(material.model):
        model, result, diverged_step = _do_steps(run, loaded, material, folder, claim, console)
    if diverged_step is not None:
        raise _diverged(run.settings, folder, result, diverged_step)
    if run.method.trains_the_model:
        run.method.save(loaded.model, folder.model)
    else:
        run.method.save(model, folder.adapter)
    if is_first_process():
        if run.method.trains_the_model:
            loaded.processor.save_pretrained(folder.model)
        folder.finish(result)
    return result


def _do_steps(
    run: Run, loaded: Loaded, material: Material, folder: RunFolder, claim: Claim, console: Console
) -> tuple[nn.Module, dict[str, Any], int | None]:
    """The trained model, its result, and the step from which it diverged, if it did."""
    settings, checkpoint = run.settings, claim.checkpoint
    with bars(console, transient=True) as report:
        start = make_start(settings, material.dataset, material.collator, loaded.device, folder.start, report)
        with start_folder(folder):
            model = run.method.prepare(material.model.train(), material.adapter, start)
    if step_of(checkpoint) >= start.steps:
        # Killed before its result was written: from the checkpoint of its last step transformers would do one more.
        checkpoint = folder.latest_checkpoint(before=start.steps)
    record, stop, bar = RunRecord(folder), GracefulStop(), ProgressBar(console, run.method.title)
    trainer = make_trainer(settings, model, material.dataset, material.collator, [record, stop, bar])
    trainer.optimizer = run.method.optimizer(trainer)
    run.method.attach(trainer)
    folder.forget_after(step_of(checkpoint))
    watch = DivergenceWatch()
    _keep_records(run, trainer, folder, loaded.model)
    watch.install(trainer)
    SaveTimes(folder, settings.save_minutes, claim.lock).install(trainer)
    record.follow(trainer)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    try:
        with (
            processes.report_lost_process(lambda: trainer.state.global_step),
            _fused(trainer) if settings.fused_adapters else contextlib.nullcontext(),
        ):
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    except processes.LostProcessError:
        stop.keep_listening()
        raise
    finally:
        bar.close()
        stop.stop_listening()
    diverged_step = watch.conclude()
    if diverged_step is None and stop.asked and trainer.state.global_step < trainer.state.max_steps:
        raise Interrupted(f"stopped after step {trainer.state.global_step}; go on with --resume")
    result = {
        "method": run.method.name,
        "model": settings.model,
        "task": tasks.name_of(settings.task),
        "steps": trainer.state.global_step,
        "train_loss": record.train_loss,
        "trainable_parameters": run.method.trainable_parameters(model),
        "seconds": round(record.seconds, 2),
        "peak_memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 3) if torch.cuda.is_available() else None,
        **rows_summary(material),
    }
    return model, result, diverged_step


@contextlib.contextmanager
def _fused(trainer: Any) -> Iterator[None]:
    """The trainer's adapters as single functions, for the length of its training."""
    if (count := processes.count()) > 1:
        raise NALoRAError(
            "fused_adapters: true", found=f"{count} processes", expected="one", fix="leave fused_adapters out"
        )
    from nalora.kernels.fused.linears import fuse_adapters

    undo = fuse_adapters(trainer.model)
    try:
        yield
    finally:
        for put_back in undo:
            put_back()


def _keep_records(run: Run, trainer: Any, folder: RunFolder, whole: nn.Module) -> None:
    """What is recorded of the gates while the run goes on."""
    settings = run.settings
    if (controller := getattr(trainer, "nalora_controller", None)) is not None:
        trainer.add_callback(GateRecord(folder, controller))
    if settings.snapshot_every:
        trained = whole if run.method.trains_the_model else trainer.model
        trainer.add_callback(Snapshots(folder, settings.snapshot_every, run.method, trained, controller))


def _diverged(settings: RunSettings, folder: RunFolder, result: dict[str, Any], step: int) -> Diverged:
    """Write a result that says so, without an adapter; what to raise."""
    error = Diverged(str(folder.path), step, advice(settings), folder.latest_checkpoint(before=step))
    if is_first_process():
        folder.finish({**result, "train_loss": None, "diverged": True, "diverged_step": step, "message": str(error)})
    return error


def _read_result(folder: RunFolder) -> dict[str, Any]:
    try:
        result = json.loads(folder.result.read_text(encoding="utf-8"))
    except ValueError:
        result = None
    if not isinstance(result, dict) or "steps" not in result:
        raise NALoRAError(
            str(folder.result),
            found="a damaged file",
            expected="the result of a finished run",
            fix="move it away, and --resume goes on from the last checkpoint",
        )
    return result
