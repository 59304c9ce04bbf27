"""A learning rate for a run: its first steps at several rates, and the rule that picks one of them.

A short run has the schedule, the data order and the seed of the whole run, and stops after a few steps (`stop_after`).
They are the runs of a study that evaluates nothing: stored, resumed and computed by workers as any study's runs.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from nalora import __version__
from nalora.errors import NALoRAError, counted, shortened
from nalora.files import atomic, outputs
from nalora.runs import checkpoints, marker
from nalora.runs.folder import read_jsonl
from nalora.runs.saved_run import diverged_step
from nalora.runs.settings import Run
from nalora.studies.job import Job, work
from nalora.studies.rate_cases import WINDOW, early_measures
from nalora.studies.rate_evidence import Evidence, octave_above
from nalora.studies.rate_rules import Case
from nalora.studies.schedule import Cell, Results, Schedule
from nalora.studies.store import Store
from nalora.studies.study import Arm, Study

NAME = "suggestion"
# An octave apart, for Adam. In the stored studies (results/) the best rates are 4e-4 (LoRA-GA) to 1.13e-2 (GraLoRA,
# k = 8) for adapters, and 4e-4 (GSM8K) to 1.6e-3 (cipher) for full fine-tuning of 135M parameters; larger models
# take lower rates. tests/results/test_packaged_evidence.py compares the grids with these studies.
ADAPTER_RATES = tuple(2.5e-4 * 2**octave for octave in range(7))
FULL_RATES = tuple(2.5e-5 * 2**octave for octave in range(7))
# Losses of two rates are equal within noise if the mean of their ratios' logarithms is fewer standard errors from 0.
# Not of their differences: a rate whose loss jumps has such large ones that it would be equal to every other.
_STANDARD_ERRORS = 3.0


@dataclass(frozen=True)
class Short:
    """What one short run logged.

    Args:
        rate: learning rate.
        folder: of the run.
        losses: training losses of the last ten steps.
        measures: of its first steps, as the rule sees them; empty before its last step, and if it diverged.
        grad_norm: median gradient norm of these steps.
        step: the last logged step.
        diverged: the step from which it diverged.
    """

    rate: float
    folder: Path
    losses: tuple[float, ...]
    measures: Mapping[str, float]
    grad_norm: float | None
    step: int
    diverged: int | None

    @property
    def loss(self) -> float | None:
        """The mean training loss of the last ten steps; None unless the run finished with finite losses."""
        return statistics.fmean(self.losses) if self.measures else None


@dataclass(frozen=True)
class Suggestion:
    """The rate to start with, or the reason why there is none.

    Args:
        rate: the rule's pick.
        reason: why there is none.
        end: lowest or highest if the pick is at an end of the grid.
        equal: other rates whose loss is the same within noise.
        next: the rate an octave above, if such a rate was better in the stored grids at so small a difference.
    """

    rate: float | None
    reason: str = ""
    end: str = ""
    equal: tuple[float, ...] = ()
    next: float | None = None


class ShortRuns(Schedule):
    """The runs of a study of short runs: every rate once, without an evaluation."""

    def screening(self, cell: Cell, results: Results = MappingProxyType({})) -> list[Job]:
        """Return a run for every rate."""
        return [self.job(cell, rate, cell.arm.seeds[0]) for rate in cell.arm.learning_rates]

    def chosen_rate(self, cell: Cell, results: Results) -> float | None:
        """Return None: no rate is trained to the end."""
        return None


def default_rates(run: Run) -> tuple[float, ...]:
    """Return the grid for a run's method; raise NALoRAError for an optimizer whose rates are not known."""
    if "adam" not in run.settings.optimizer:
        raise NALoRAError(
            f"optimizer: {run.settings.optimizer}",
            found="no default learning rates for it",
            expected="rates for an optimizer other than Adam",
            fix="give --rates, for example --rates 0.1,0.2,0.4",
        )
    return FULL_RATES if run.method.trains_the_model else ADAPTER_RATES


def rates_of(text: str) -> tuple[float, ...]:
    """Return the rates of a list with commas, from the lowest."""
    expected, fix = "two or more different positive numbers", "write them as 1e-4,2e-4,4e-4"
    try:
        rates = sorted(float(part) for part in text.split(","))
    except ValueError:
        rates = []
    positive = all(rate > 0 and math.isfinite(rate) for rate in rates)
    if len({f"{rate:g}" for rate in rates}) < max(len(rates), 2) or not positive:
        raise NALoRAError("--rates", found=shortened(repr(text)), expected=expected, fix=fix)
    return tuple(rates)


def short_runs(run: Run, rates: Sequence[float], steps: int) -> Study:
    """Return the study of a run's first steps at these rates.

    Raises:
        NALoRAError: the run's own settings do not allow that.
    """
    settings = run.settings
    if settings.stop_after is not None:
        raise NALoRAError(
            f"stop_after: {settings.stop_after}",
            found="a run that stops early itself",
            expected="the whole run, of which the first steps are trained",
            fix="remove it (stop_after=), and give --steps for the number of first steps",
        )
    if settings.schedule == "range_test":
        raise NALoRAError(
            "schedule: range_test",
            found="a run that tries learning rates itself",
            expected="the schedule of the run that you want to train",
            fix="give that, for example schedule=cosine",
        )
    if settings.steps is not None:
        refuse_longer(steps, settings.steps)
    unneeded = {"save_every": 0, "snapshot_every": 0, "gate_movement_steps": None, "report_to": "none"}
    shared = run.to_dict() | unneeded | {"stop_after": steps, "log_every": 1}
    for name in ("output", "learning_rate", "seed", "validation_size"):
        del shared[name]
    arm, seeds = Arm(settings.method, {}, tuple(rates), (settings.seed,)), (settings.seed,)
    return Study(NAME, shared, (arm,), validation_size=settings.validation_size, screening_seeds=seeds, generate="none")


def refuse_longer(steps: int, whole: int) -> None:
    """Raise NALoRAError unless the short runs have fewer steps than the whole run."""
    if steps >= whole:
        raise NALoRAError(
            f"--steps {steps}",
            found=f"a run of {counted(whole, 'step')}",
            expected="fewer steps than the whole run has",
            fix=(f"give --steps {max(1, whole // 3)}, or " if whole > 1 else "")
            + f"train {-(-(steps + 1) // whole)} times as long (epochs=… or steps=…), or with a smaller batch_size",
        )


def store_of(folder: Path) -> Path:
    """Return the store of the short runs in an output folder."""
    return folder / "runs"


def numbers_file(folder: Path) -> Path:
    """Return the file with the numbers of a suggestion."""
    return folder / f"{NAME}.json"


def refuse_foreign(folder: Path) -> None:
    """Raise NALoRAError if the output folder, or a name that will be written in it, is not nalora's."""
    marker.refuse_foreign(folder, "suggest", option="--output")
    marker.refuse_foreign(store_of(folder), "store", option="--output")
    own, kind = (lambda head: b'"suggested_rate"' in head), "a suggestion"
    outputs.refuse_foreign_files([numbers_file(folder)], own, option="--output", kind=kind)


def claim(folder: Path) -> None:
    """Create the output folder and its store, with their markers, if they are missing."""
    refuse_foreign(folder)
    marker.mark(folder, "suggest")
    marker.mark(store_of(folder), "store")


def train_shortly(job: Job) -> None:
    """Train a short run, and remove what nobody needs of it: its weights and its checkpoints."""
    work(job)
    folder = Store(job.store).folder(job.key)
    for path in (folder.trained, *checkpoints.own(folder.checkpoints)):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)


def logged(schedule: Schedule, steps: int) -> list[Short]:
    """Return what every short run has logged so far, from the lowest rate."""
    (cell,) = schedule.cells
    shorts = []
    for rate in cell.arm.learning_rates:
        folder = Store(schedule.store).folder(schedule.job(cell, rate, cell.arm.seeds[0]).key)
        rows, diverged = read_jsonl(folder.metrics), diverged_step(folder)
        last = [row for row in rows if steps - WINDOW < row["step"] <= steps]
        measures = early_measures(rows, steps) if diverged is None and folder.result.is_file() else {}
        norms = [row["grad_norm"] for row in last if isinstance(row.get("grad_norm"), int | float)]
        losses = tuple(row["loss"] for row in last if isinstance(row.get("loss"), int | float))
        shorts.append(
            Short(
                rate=rate,
                folder=folder.path,
                losses=losses,
                measures=measures if f"loss@{steps}" in measures else {},
                grad_norm=statistics.median(norms) if norms else None,
                step=rows[-1]["step"] if rows else 0,
                diverged=diverged,
            )
        )
    return shorts


def suggest(shorts: Sequence[Short], evidence: Evidence, steps: int) -> Suggestion:
    """Return the pick of the evidence's rule among finished short runs, or why it picks none."""
    finite = {short.rate: short for short in shorts if short.loss is not None}
    if not finite:
        return Suggestion(None, "all rates diverged: give lower ones")
    lowest, highest = (side(finite.values(), key=lambda short: short.loss or 0.0) for side in (min, max))
    if len(finite) > 1 and equal(lowest.losses, highest.losses):
        return Suggestion(
            None,
            f"all rates have the same loss within noise ({lowest.loss:.4f} to {highest.loss:.4f}): train more steps "
            "with --steps, or give rates that are further apart",
        )
    early = {rate: short.measures for rate, short in finite.items()}
    case = Case("short runs", steps, {short.rate: math.nan for short in shorts}, early)
    rate = dataclasses.replace(evidence.rule, steps=steps).pick(case)
    same = [other for other in finite if other != rate and equal(finite[other].losses, finite[rate].losses)]
    above = finite.get(octave_above(case.rates, rate) or 0.0)
    most = (1 + evidence.total.next_gap) * (finite[rate].loss or 0.0)
    return Suggestion(
        rate,
        end={case.rates[0]: "lowest", case.rates[-1]: "highest"}.get(rate, ""),
        equal=tuple(same),
        next=above.rate if above is not None and (above.loss or 0.0) <= most else None,
    )


def equal(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether the losses of the same steps at two rates differ by less than three standard errors."""
    ratios = [math.log(max(first, 1e-9) / max(second, 1e-9)) for first, second in zip(one, other, strict=True)]
    mean = abs(statistics.fmean(ratios))
    if len(ratios) < 2 or mean == 0:
        return mean == 0
    return mean < _STANDARD_ERRORS * statistics.stdev(ratios) / math.sqrt(len(ratios))


def compared(steps: int) -> str:
    """Return what the loss is by which rates are compared."""
    return f"mean loss of steps {max(1, steps - WINDOW + 1)} to {steps}"


def extended(rates: Sequence[float], end: str) -> list[float]:
    """Return the grid with two more rates at its lowest or highest end, as far apart as those there."""
    factor = rates[0] / rates[1] if end == "lowest" else rates[-1] / rates[-2]
    outer = rates[0] if end == "lowest" else rates[-1]
    return sorted([*rates, *(float(f"{outer * factor**distance:.3g}") for distance in (1, 2))])


def as_typed(rate: float) -> str:
    """Return a rate for a command line, in as few digits as keep its value: it is part of the key of a short run."""
    short = f"{rate:g}"
    return short if float(short) == rate else repr(rate)


def write(folder: Path, shorts: Sequence[Short], suggestion: Suggestion, **further: Any) -> Path:
    """Write the suggestion and its evidence as JSON; `further` entries are added."""
    content = {
        "suggested_rate": suggestion.rate,
        "why_none": suggestion.reason or None,
        "end_of_grid": suggestion.end or None,
        "same_loss_within_noise": list(suggestion.equal),
        "also_try": suggestion.next,
        "nalora": __version__,
        **further,
        "rates": [
            {
                "learning_rate": short.rate,
                "loss": short.loss,
                "losses": list(short.losses),
                "grad_norm": short.grad_norm,
                "diverged_step": short.diverged,
                "run": str(short.folder.relative_to(folder.absolute())),
            }
            for short in shorts
        ],
    }
    file = numbers_file(folder)
    atomic.write(file, atomic.json_text(content, indent=1) + "\n")
    return file
