"""Train one run: load, prepare, train with `transformers.Trainer`, save an ordinary adapter."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from rich.console import Console
from torch import nn

from nalora import tasks
from nalora.distributed import processes
from nalora.distributed.processes import is_first_process
from nalora.errors import NALoRAError
from nalora.files.atomic import read_json
from nalora.methods.optimizers import optimizer_with_factors, refuse_own_groups
from nalora.models import loading
from nalora.models.attention import without_cache
from nalora.models.compatibility import resolve_device
from nalora.models.loading import Loaded
from nalora.runs.folder import RunFolder
from nalora.runs.inputs import RunInputs, checked_tokenizer, kind_of, prepare
from nalora.runs.progress import bars
from nalora.runs.saved_run import Diverged, advice, refuse_diverged
from nalora.runs.settings import Run
from nalora.runs.targets import near_names
from nalora.runs.values import refuse_missing_loggers
from nalora.training.accelerations import larger_loss_chunks, liger_contained
from nalora.training.batches import last_step, length_notices, make_start, steps_of
from nalora.training.callbacks import GracefulStop, ProgressBar, RunRecord, StopAfter
from nalora.training.checkpointing import CheckpointSchedule
from nalora.training.claim import Claim, claimed, step_of
from nalora.training.divergence import DivergenceWatch
from nalora.training.fused_layers import fused_layers, refuse_unless_fused_layers_fit
from nalora.training.gate_movement import GateMovement
from nalora.training.snapshots import GateRecord, Snapshots
from nalora.training.trainer import make_trainer


class Interrupted(Exception):  # noqa: N818 - not an error: the user requested it
    """The run was stopped at a step from which it can be resumed."""


def train(run: Run, *, resume: bool = False, take_over: bool = False, console: Console | None = None) -> dict[str, Any]:
    """Train and save; return the content of `result.json`.

    Args:
        run: what to train.
        resume: whether to resume the run in its folder.
        take_over: whether to take the folder over from a process on another host, which must not run any more.
        console: for progress and messages.

    Raises:
        NALoRAError: something is missing, or the folder holds another run, files that are not nalora's, or is in use.
        Interrupted: stopped by Ctrl-C, with a checkpoint.
        Diverged: loss or gradients stayed non-finite, in this training or in the finished one to be resumed.
    """
    settings = run.settings
    device = resolve_device(settings.device)
    refuse_missing_loggers(settings.report_to)
    processes.init_process_group(device)
    refuse_unless_fused_layers_fit(run, device)
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
        with bars(console, transient=True, after=1) as report:
            task = tasks.get(settings.task, data_dir=settings.data_dir, report=report, **run.task_options)
        if notice := task.notice():
            console.print(notice, highlight=False)
        with console.status(f"loading {settings.model}"):
            loaded = _loaded(task, run)
        with bars(console, transient=True, after=1) as report:
            inputs = prepare(task, loaded, settings, report)
        last_step(settings, steps_of(settings, len(inputs.dataset)))
        for line in (*inputs.notices(settings.max_length), *length_notices(settings, len(inputs.dataset))):
            console.print(line, highlight=False)
        with contextlib.ExitStack() as stack:
            if settings.liger:
                stack.enter_context(liger_contained(loaded.model))
                stack.enter_context(larger_loss_chunks())
            with without_cache(inputs.model):
                model, result, diverged_step = _train_steps(run, loaded, inputs, folder, claim, console)
            _save(run, loaded, model, folder, result, diverged_step)
        return result


def _loaded(task: tasks.Task, run: Run) -> Loaded:
    """Load the model to train; an error about an unknown model suggests the nearest name."""
    settings = run.settings
    with near_names(settings.model):
        spec = settings.model_spec(kind_of(task, settings.model_spec()))
        return loading.load(spec, checked_tokenizer(task, spec, settings.prompt_style))


def _train_steps(
    run: Run, loaded: Loaded, inputs: RunInputs, folder: RunFolder, claim: Claim, console: Console
) -> tuple[nn.Module, dict[str, Any], int | None]:
    """Return the trained model, its result, and the step from which it diverged, if it did."""
    settings = run.settings
    with bars(console, transient=True) as report:
        start = make_start(settings, inputs.dataset, inputs.collator, loaded.device, folder.start, report)
        folder.start.mkdir(exist_ok=True)
        model = run.method.prepare(inputs.model.train(), inputs.adapter, start)
    processes.barrier()
    if is_first_process() and folder.start != folder.path:
        with contextlib.suppress(OSError):  # the method has written start files
            folder.start.rmdir()
    with fused_layers(model, run, console):
        result, diverged_step = _train_prepared(run, loaded, inputs, folder, claim, console, model, start.steps)
    return model, result, diverged_step


def _train_prepared(
    run: Run,
    loaded: Loaded,
    inputs: RunInputs,
    folder: RunFolder,
    claim: Claim,
    console: Console,
    model: nn.Module,
    steps: int,
) -> tuple[dict[str, Any], int | None]:
    """Train a model that has its adapter; return the result, and the step from which it diverged, if it did."""
    settings, checkpoint, last = run.settings, claim.checkpoint, last_step(run.settings, steps)
    if step_of(checkpoint) >= last:
        # Killed before its result was written: from the checkpoint of the last step transformers would train one more.
        checkpoint = folder.latest_checkpoint(before=last)
    record, stop, bar = RunRecord(folder), GracefulStop(), ProgressBar(console, run.method.title, last)
    early = [StopAfter(last)] if last < steps else []
    trainer = make_trainer(settings, model, inputs.dataset, inputs.collator, [record, stop, bar, *early])
    trainer.optimizer = run.method.optimizer(trainer)
    if settings.learning_rate_factors:
        refuse_own_groups(run.method.name, trainer.optimizer)
        trainer.optimizer = optimizer_with_factors(trainer, settings.learning_rate_factors)
    run.method.attach(trainer)
    folder.remove_after(step_of(checkpoint))
    if (controller := getattr(trainer, "nalora_controller", None)) is not None:
        trainer.add_callback(GateRecord(folder, controller))
    if settings.snapshot_every:
        trained = loaded.model if run.method.trains_the_model else trainer.model
        trainer.add_callback(Snapshots(folder, settings.snapshot_every, last, run.method, trained, controller))
    if settings.gate_movement_steps:
        GateMovement(settings.gate_movement_steps, trainer.model, inputs).install(trainer)
    watch = DivergenceWatch()
    watch.install(trainer)
    CheckpointSchedule(folder, settings.save_minutes, claim.lock).install(trainer)
    record.start(trainer)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    try:
        with processes.report_lost_process(lambda: trainer.state.global_step):
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    except processes.LostProcessError:
        stop.keep_handlers()
        raise
    finally:
        bar.progress.stop()
        stop.restore_handlers()
    diverged_step = watch.conclude()
    if diverged_step is None and stop.requested and trainer.state.global_step < last:
        raise Interrupted(f"stopped after step {trainer.state.global_step}")
    result = {
        "method": run.method.name,
        "model": settings.model,
        "task": tasks.name_of(settings.task),
        "steps": trainer.state.global_step,
        **({"stopped_early": True, "planned_steps": steps} if last < steps else {}),
        "train_loss": record.train_loss,
        "trainable_parameters": run.method.trainable_parameters(model),
        "seconds": round(record.seconds, 2),
        "peak_memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 3) if torch.cuda.is_available() else None,
        **inputs.summary(),
    }
    return result, diverged_step


def _save(
    run: Run, loaded: Loaded, model: nn.Module, folder: RunFolder, result: dict[str, Any], diverged_step: int | None
) -> None:
    """Save the adapter, or the whole model, and the result; of a diverged run only the result, and raise Diverged."""
    if diverged_step is not None:
        last = folder.latest_checkpoint(before=diverged_step)
        error = Diverged(str(folder.path), diverged_step, advice(run.settings), last)
        if is_first_process():
            diverged = {"diverged": True, "diverged_step": diverged_step, "message": str(error)}
            folder.finish({**result, "train_loss": None, **diverged})
        raise error
    if run.method.trains_the_model:
        run.method.save(loaded.model, folder.model)
    else:
        run.method.save(model, folder.adapter)
    if is_first_process():
        # With its chat template: this folder is what people take away.
        loaded.processor.save_pretrained(folder.trained)
        folder.finish(result)


def _read_result(folder: RunFolder) -> dict[str, Any]:
    """Return the content of result.json; raise NALoRAError if it is damaged."""
    result = read_json(folder.result)
    if result is None or "steps" not in result:
        raise NALoRAError(
            str(folder.result),
            found="a damaged file",
            expected="the result of a finished run",
            fix="move it away; --resume then continues from the last checkpoint",
        )
    return result
