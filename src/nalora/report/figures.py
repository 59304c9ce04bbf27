"""All figures of runs as PNG and SVG; what cannot be drawn is said, and no empty file is left."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nalora.report import drawing, gate_figures, paper_figures
from nalora.report.capacity import read_capacity
from nalora.report.data import RunData

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# More points than this are drawn pale, with their running mean over them.
MANY_POINTS = 150


class Written(NamedTuple):
    """Files, and a sentence for every figure that was not drawn."""

    files: list[Path]
    skipped: list[str]


def write_figures(runs: Sequence[RunData], folder: Path) -> Written:
    """Everything there is to draw of these runs, compared where they can share axes."""
    figures: dict[str, Figure | str] = {
        "loss": loss_curves(runs),
        "step-scales": gate_figures.step_scales(runs),
        "update-norm": update_norms(runs),
    }
    for run, name in zip(runs, _file_names([run.name for run in runs]), strict=True):
        figures[f"{name}-regimes"] = gate_figures.regime_maps(run)
        figures[f"{name}-mask"] = gate_figures.mask_maps(run)
        figures[f"{name}-kappa"] = gate_figures.kappa_figure(run)
    return _write({**figures, **_of_paper(runs)}, folder)


def _file_names(names: Sequence[str]) -> list[str]:
    """A beginning of a file's name for each run, no two alike: short enough for every file system."""
    found: list[str] = []
    for name in names:
        plain = re.sub(r"[^\w.-]+", "-", name).strip("-.") or "run"
        # 255 bytes are the limit, and a letter may take four.
        plain, number = plain[:48].rstrip("-."), 2
        unique = plain
        while unique in found:
            unique, number = f"{plain}-{number}", number + 1
        found.append(unique)
    return found


def write_paper_figures(runs: Sequence[RunData], folder: Path) -> Written:
    """The paper's two diagnostic figures of these runs."""
    return _write(_of_paper(runs), folder)


def loss_curves(runs: Sequence[RunData]) -> Figure | str:
    """The training loss of every run over its steps."""
    logged = [(number, run, *run.series("loss")) for number, run in enumerate(runs)]
    told = [each for each in logged if np.isfinite(each[3]).any()]
    if not told:
        return "no run logged a loss"
    with drawing.look():
        figure, (axes,) = drawing.panels(1, 1, 6.4, 3.4)
        drawing.title(figure, "Training loss")
        smoothed = 0
        for number, run, steps, losses in told:
            style = drawing.stroke(number)
            if len(losses) > MANY_POINTS:
                smoothed = max(smoothed, window := len(losses) // 50)
                axes.plot(steps, losses, color=style["color"], alpha=0.25, linewidth=0.8, label="_raw")
                losses = running_mean(losses, window)
            axes.plot(steps, losses, label=drawing.line_label(run.name), **style)
        drawing.step_axis(axes)
        axes.set_ylabel("cross-entropy per target token (nats)")
        notes = [] if len(told) > 1 else [f"Run: {told[0][1].name}."]
        if smoothed:
            notes.append(f"Pale: every logged step. Line: running mean over {smoothed} logged steps.")
        shown = [each[1] for each in told]
        notes += drawing.gathered(
            (run.name, run.missing.get("metrics", "it logged no loss")) for run in runs if run not in shown
        )
        drawing.below(figure, axes, notes)
    return figure


def update_norms(runs: Sequence[RunData]) -> Figure | str:
    """The size of every run's update by layer."""
    measured = [(run, *read_capacity(run)) for run in runs]
    told = [run for run, capacity, _ in measured if capacity is not None]
    without = drawing.gathered((run.name, why) for run, capacity, why in measured if capacity is None)
    if not told:
        return "; ".join(without)
    with drawing.look():
        figure, (axes,) = drawing.panels(1, 1, 6.4, 3.4)
        drawing.title(figure, "Size of the update by layer, all adapted modules together")
        for number, (run, capacity, _) in enumerate(measured):
            if capacity is None:
                continue
            labels, norms = capacity.layer_norms()
            axes.plot(
                np.arange(len(norms)), norms, label=drawing.line_label(run.name), **drawing.stroke(number, marked=True)
            )
            drawing.layer_ticks(axes.xaxis, labels)
        drawing.from_zero(axes)
        axes.set_xlabel("layer")
        axes.set_ylabel("Frobenius norm of s·B·A")
        drawing.below(figure, axes, without if len(told) > 1 else [f"Run: {told[0].name}.", *without])
    return figure


def running_mean(values: NDArray[np.float64], window: int) -> NDArray[np.float64]:
    """Centred means over `window` values, fewer at the ends, without what is not finite."""
    there = np.isfinite(values)
    kernel = np.ones(window)
    count = np.convolve(there.astype(float), kernel, mode="same")
    total = np.convolve(np.where(there, values, 0.0), kernel, mode="same")
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def _of_paper(runs: Sequence[RunData]) -> dict[str, Figure | str]:
    return {
        "diagnostics-over-training": paper_figures.over_training(runs),
        "diagnostics-by-layer": paper_figures.by_layer(runs),
    }


def _write(figures: dict[str, Figure | str], folder: Path) -> Written:
    drawing.refuse_foreign(file for name in figures for file in drawing.files_of(folder, name))
    files: list[Path] = []
    skipped: list[str] = []
    for name, figure in figures.items():
        if isinstance(figure, str):
            skipped.append(f"{name} was not drawn: {figure}")
        else:
            files += drawing.save(figure, folder, name)
    return Written(files, skipped)
