"""A run before it is trained: data, parameters, memory, disk space and problems, from a model without weights."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import resource
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nalora import tasks
from nalora.control.blocks import find_blocks
from nalora.control.plan import Plan, make_plan
from nalora.errors import NALoRAError
from nalora.methods.lora import LoRA
from nalora.methods.method import Method, Start
from nalora.methods.na_lora import NALoRA
from nalora.models import loading
from nalora.models.compatibility import default_dtype, resolve_device
from nalora.runs import marker
from nalora.runs.folder import RunFolder
from nalora.runs.inputs import RunInputs, kind_of, prepare
from nalora.runs.lock import FolderLock
from nalora.runs.settings import Run, RunSettings
from nalora.runs.targets import near_names
from nalora.runs.values import refuse_missing_loggers
from nalora.runs.writable import refuse_unwritable
from nalora.training.accelerations import refuse_unless_graphs_fit, refuse_unless_liger_runs
from nalora.training.batches import Split, last_step, split_batch, steps_of
from nalora.training.fused_layers import expected_layers, refuse_unless_fused_layers_fit
from nalora.training.memory import Memory, estimate

# Rows whose lengths are looked at: a larger data set is tokenised again for every look.
_MOST_ROWS = 20_000
_MEASURED_STEPS = 4
_KEPT_CHECKPOINTS = 2
# Saved relative to the unmodified base model, these adapters have twice the rank.
_SAVED_TWICE = ("pissa", "lora-ga")
# In torch's errors about a tensor on the meta device: without values, assigned to another's data, next to others.
_OF_META = ("meta tensor", "incompatible tensor type", "expected device meta")


@dataclass
class DryRun:
    """What is known about a run; parts that an earlier problem hides are None.

    Attributes:
        problems: the reasons why the run would not start.
        inputs: the data as it would be trained on.
        split: the batch of a step.
        steps: the number of optimizer steps, over which the learning rate rises and falls.
        last_step: the step after which the run ends: the last one, or `stop_after`.
        lengths: tokens of the rows, or of the first 20,000 of them; empty for images.
        trainable: the number of trained values.
        parameters: the number of values of the base model.
        as_lora: whether `trainable` is that of LoRA, because the method's own start needs values of the weights.
        plan: of NA-LoRA, if the method is NA-LoRA.
        fused: what would be computed by fused layers or be in FP8, and why, line by line.
        memory: at the peak of a step.
        device: where it would be trained.
        disk: bytes by what needs them.
        free: free bytes where the run's folder would be.
    """

    problems: list[str] = field(default_factory=list)
    inputs: RunInputs | None = None
    split: Split | None = None
    steps: int = 0
    last_step: int = 0
    lengths: list[int] = field(default_factory=list)
    trainable: int = 0
    parameters: int = 0
    as_lora: bool = False
    plan: Plan | None = None
    fused: list[tuple[str, str]] = field(default_factory=list)
    memory: Memory | None = None
    device: str = "cpu"
    disk: dict[str, int] = field(default_factory=dict)
    free: int = 0

    def check(self, part: Callable[[], None]) -> bool:
        """Return whether a part of the examination found no problem."""
        try:
            part()
        except NALoRAError as error:
            self.problems.append(str(error))
            return False
        return True


@dataclass(frozen=True)
class Measured:
    """Seconds per step, and the bytes that the process, or the GPU, used at its peak."""

    seconds: float
    steps: int
    peak: int
    on_gpu: bool


def examine(run: Run, *, resume: bool = False) -> DryRun:
    """Return what `train` would do; nothing is written to the run's folder, and problems are collected."""
    found, settings = DryRun(), run.settings
    found.check(run.refuse_unready)
    found.check(lambda: refuse_missing_loggers(settings.report_to))
    found.check(lambda: _check_folder(run, resume))
    if not found.check(lambda: _choose_device(run, found)):
        return found
    may_fuse = _check_accelerations(run, found)
    if found.check(lambda: _read_data(run, found)):
        found.check(lambda: _prepare_model(run, found, may_fuse=may_fuse))
    return found


def measure(run: Run) -> Measured:
    """Train the first steps of a run in a temporary folder, which is removed."""
    from nalora.training.run import train

    steps = min(run.settings.steps or _MEASURED_STEPS, _MEASURED_STEPS)
    with tempfile.TemporaryDirectory(prefix="nalora-") as folder:
        changes: dict[str, Any] = dict(
            output=str(Path(folder) / "run"), steps=steps, log_every=1, save_every=0, save_minutes=0.0,
            snapshot_every=0, gate_movement_steps=None, report_to="none", stop_after=None,
        )  # fmt: skip
        result = train(dataclasses.replace(run, settings=dataclasses.replace(run.settings, **changes)))
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ends = [json.loads(line)["seconds"] for line in lines]
    # The first step also loads kernels; without a second one it is all there is.
    each = [after - before for before, after in itertools.pairwise(ends)] or ends
    if (gpu := result["peak_memory_gib"]) is not None:
        return Measured(statistics.median(each), steps, round(gpu * 2**30), on_gpu=True)
    unit = 1 if sys.platform == "darwin" else 1024
    return Measured(
        statistics.median(each), steps, unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, on_gpu=False
    )


def _check_folder(run: Run, resume: bool) -> None:
    folder = RunFolder(run.settings.output or "runs/run")
    if marker.is_marked(folder.path, "run"):
        FolderLock(folder.path).refuse_if_owned()
    folder.refuse(run.to_dict(), resume=resume)
    refuse_unwritable(folder.path, "give another output=, or the right to write there")


def _choose_device(run: Run, found: DryRun) -> None:
    found.device = resolve_device(run.settings.device)
    found.split = split_batch(run.settings)


def _check_accelerations(run: Run, found: DryRun) -> bool:
    """Collect what the device and the settings do not allow; return whether layers could be fused or in FP8."""
    settings, device, split = run.settings, found.device, found.split
    assert split is not None
    if settings.liger:
        found.check(lambda: refuse_unless_liger_runs(device))
    if settings.cuda_graphs:
        dtype = settings.dtype or default_dtype(device)
        found.check(lambda: refuse_unless_graphs_fit(settings, device, dtype, split.accumulated, split.processes))
    return found.check(lambda: refuse_unless_fused_layers_fit(run, device))


def _read_data(run: Run, found: DryRun) -> None:
    settings, split = run.settings, found.split
    assert split is not None
    task = tasks.get(settings.task, data_dir=settings.data_dir, **run.task_options)
    with near_names(settings.model):
        loaded = loading.load_skeleton(settings.model_spec(kind_of(task, settings.model_spec())))
    found.inputs = inputs = prepare(task, loaded, settings)
    found.steps = steps_of(settings, len(inputs.dataset))
    found.last_step = found.steps
    found.check(lambda: _stop(found, settings))
    if inputs.rows is not None:
        rows = inputs.rows.rows
        found.lengths = [len(rows[index]["input_ids"]) for index in range(min(len(rows), _MOST_ROWS))]


def _stop(found: DryRun, settings: RunSettings) -> None:
    found.last_step = last_step(settings, found.steps)


def _prepare_model(run: Run, found: DryRun, *, may_fuse: bool) -> None:
    inputs, split, settings = found.inputs, found.split, run.settings
    assert inputs is not None
    assert split is not None
    found.parameters = sum(parameter.numel() for parameter in inputs.model.parameters())
    model, found.as_lora = _prepared(run.method, inputs, Start(seed=settings.seed, steps=found.steps))
    found.trainable = run.method.trainable_parameters(model)
    if may_fuse:
        found.check(lambda: found.fused.extend(expected_layers(model, run, found.device)))
    if isinstance(run.method, NALoRA):
        found.plan = make_plan(find_blocks(model), run.method.config, "auto")
    dtype = settings.dtype or default_dtype(found.device)
    lengths = found.lengths or [0]
    longest = inputs.dataset[max(range(len(lengths)), key=lengths.__getitem__)]
    found.memory = estimate(
        model,
        inputs.collator([longest] * min(split.micro, len(inputs.dataset))),
        optimizer=settings.optimizer,
        accumulated=split.accumulated,
        autocast=None if dtype == "float32" else getattr(torch, dtype),
        checkpointing=settings.gradient_checkpointing,
        quantise=settings.quantise or settings.base,
    )
    _estimate_disk(run, found)


def _prepared(method: Method, inputs: RunInputs, start: Start) -> tuple[nn.Module, bool]:
    """Return the model with the method's adapter, or with LoRA's if the method starts from weights or gradients."""
    try:
        return method.prepare(copy.deepcopy(inputs.model), inputs.adapter, start), False
    except RuntimeError as error:
        if not _lacks_values(error):
            raise
    return LoRA().prepare(inputs.model, inputs.adapter, start), True


def _lacks_values(error: BaseException) -> bool:
    """Whether the error is torch's for values that a tensor on the meta device does not have, or PEFT's about it."""
    if isinstance(error, NALoRAError):
        return error.__cause__ is not None and _lacks_values(error.__cause__)
    return isinstance(error, NotImplementedError) or any(words in str(error) for words in _OF_META)


def _estimate_disk(run: Run, found: DryRun) -> None:
    settings, memory = run.settings, found.memory
    assert memory is not None
    host = run.method.host if isinstance(run.method, NALoRA) else run.method
    adapter = memory.trained * (2 if host.name in _SAVED_TWICE else 1)
    found.disk["model" if run.method.trains_the_model else "adapter"] = adapter
    if settings.save_every or settings.save_minutes:
        # While one is written, those before it are still there.
        found.disk["checkpoints"] = (_KEPT_CHECKPOINTS + 1) * (memory.trained + memory.optimizer)
    if settings.snapshot_every:
        found.disk["snapshots"] = (found.last_step // settings.snapshot_every + 2) * adapter
    place = Path(settings.output or "runs/run").absolute()
    found.free = shutil.disk_usage(next(folder for folder in (place, *place.parents) if folder.is_dir())).free
    if (needed := sum(found.disk.values())) > found.free:
        found.problems.append(
            f"{place}: found {found.free / 2**30:.1f} GiB of free space, expected {needed / 2**30:.1f} GiB;"
            " give another output=, or fewer snapshots"
        )
