"""`nalora train --dry-run`: what a run would do, before it does it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.markup import escape

from nalora.cli.screen import INTERRUPTED, table
from nalora.errors import counted

if TYPE_CHECKING:
    from nalora.runs.settings import Run
    from nalora.training.dry_run import DryRun, Measured


def preview(screen: Console, run: Run, *, resume: bool, measured: bool) -> None:
    """Print data, parameters, memory, time and disk space of a run, and what would stop it (exit code 2)."""
    from nalora.training.dry_run import examine, measure
    from nalora.training.run import Interrupted

    with screen.status("reading data and model"):
        found = examine(run, resume=resume)
    timing = None
    if measured and not found.problems:
        try:
            with screen.status("training the first steps in a temporary folder"):
                timing = measure(run)
        except Interrupted:
            screen.print("stopped; nothing was kept", highlight=False)
            raise typer.Exit(INTERRUPTED) from None
    rows = table("", "expected", "basis", show_header=False)
    for row in _lines(run, found, timing):
        rows.add_row(*map(escape, row))
    screen.print(rows)
    if found.plan is not None:
        screen.print(str(found.plan), markup=False, highlight=False)
    for problem in found.problems:
        screen.print(f"Problem: {problem}", markup=False, highlight=False, soft_wrap=True)
    screen.print("Nothing was trained, and nothing was written to the run's folder.", highlight=False)
    if found.problems:
        raise typer.Exit(2)


def _lines(run: Run, found: DryRun, timing: Measured | None) -> Iterator[tuple[str, str, str]]:
    """Yield (what, expected value, basis) for everything that is known."""
    from nalora.training.batches import length_notices, passes_over

    settings, inputs, split, memory = run.settings, found.inputs, found.split, found.memory
    yield "run", f"{run.method.title} of {settings.model} on {settings.task}", f"into {settings.output}"
    if inputs is None or split is None:
        return
    for number, line in enumerate(inputs.notices(settings.max_length) or [counted(len(inputs.dataset), "example")]):
        yield "" if number else "data", line, ""
    if lengths := found.lengths:
        basis = "" if len(lengths) == len(inputs.dataset) else f"of the first {len(lengths):,} rows"
        yield "", f"{sum(lengths) / len(lengths):.0f} tokens per row on average, at most {max(lengths):,}", basis
    passes = f"{split.accumulated:,} pass{'' if split.accumulated == 1 else 'es'} of {split.micro}"
    epochs = passes_over(settings, len(inputs.dataset), found.last_step)
    stops = f", stops after {found.last_step:,}" if found.last_step < found.steps else ""
    yield (
        "steps",
        f"{found.steps:,} of {counted(settings.batch_size, 'row')}{stops}",
        f"{passes} each; {epochs:.3g} times the data",
    )
    for notice in length_notices(settings, len(inputs.dataset)):
        yield "", notice, ""
    if memory is None:
        return
    share = 100 * found.trainable / found.parameters
    basis = "as LoRA: the method's own start needs the weights" if found.as_lora else ""
    yield "parameters", f"{found.trainable:,} trained, {share:.2f} % of {found.parameters:,}", basis
    for number, (line, why) in enumerate(found.fused):
        yield "" if number else "layers", line, why
    yield from _memory_lines(settings, found, timing)
    if timing is None:
        yield "time", "unknown", "add --measure to time the first steps on this machine"
    else:
        total = timing.seconds * found.last_step
        basis = f"{counted(timing.steps, 'step')} measured on this machine; without start, checkpoints and evaluation"
        yield "time", f"{_duration(total)}, {timing.seconds:.3g} s per step", basis
    parts = ", ".join(f"{name} {_size(size)}" for name, size in found.disk.items())
    yield "disk", f"{parts}; {_size(found.free)} are free", "values times their size; logs are small"


def _memory_lines(settings: Any, found: DryRun, timing: Measured | None) -> Iterator[tuple[str, str, str]]:
    memory, split = found.memory, found.split
    assert memory is not None
    assert split is not None
    basis = settings.dtype or "the device's own type"
    basis += ", linear layers of the base in FP8" if settings.base else ""
    yield "memory", f"weights {_size(memory.frozen + memory.trained)}", basis
    yield "", f"gradients {_size(memory.gradients)}, optimizer state {_size(memory.optimizer)}", settings.optimizer
    if memory.activations is None:
        yield "", "activations unknown", f"{memory.why_unknown}; add --measure"
    else:
        longest = f"{counted(split.micro, 'row')} of {max(found.lengths, default=0):,} tokens" if found.lengths else ""
        basis = f"a pass over {longest or counted(split.micro, 'example')}, computed without values on a CPU"
        yield "", f"activations {_size(memory.activations)}", basis
    yield "", f"in all {_size(memory.total)}", "an estimate; without fused layers, Liger's kernels, several GPUs"
    if found.device == "cpu":
        basis = "with Python, libraries and blocks that the C library keeps"
        yield "", f"the process about {_size(memory.process_on_cpu)}", basis
    else:
        yield "", "", "not checked on this kind of device; its allocator reserves more than tensors need"
    if timing is not None:
        what = "the GPU's peak" if timing.on_gpu else "the process's peak, Python and its libraries included"
        yield "", f"measured {_size(timing.peak)}", what


def _size(number: float) -> str:
    """Return a number of bytes in the unit that gives it three digits."""
    for unit in ("bytes", "KiB", "MiB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1024
    return f"{number:,.2f} GiB"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
