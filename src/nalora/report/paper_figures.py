"""The paper's two diagnostic figures, drawn from diagnosis.json of any runs.

Flip rate, κ drift and suppressive crossings between adjacent checkpoints: over training (averaged over layers), and
by layer (averaged over the intervals).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from nalora.report import drawing
from nalora.report.data import RunData, layer_labels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array = NDArray[np.float64]
MEASURES = {
    "flip": ("regime flip rate", "share of z"),
    "kappa_drift": ("κ drift", "mean |κ(z′) − κ(z)|"),
    "suppressive": ("suppressive crossings", "share of z"),
}


def over_training(runs: Sequence[RunData]) -> Figure | str:
    """Each diagnostic at the end of every interval, the mean over layers; or why there is nothing to draw."""

    def draw(axes: Axes, run: RunData, table: Array, style: dict[str, Any]) -> None:
        axes.plot(
            [interval["to"] for interval in _intervals(run)],
            known_mean(table, 1),
            label=drawing.line_label(run.name),
            **style,
        )
        drawing.step_axis(axes)
        axes.set_xlabel("step (end of the interval)")

    title = "Effective-homogeneity diagnostics over training: adjacent checkpoints, mean over layers"
    return _figure(runs, title, draw)


def by_layer(runs: Sequence[RunData]) -> Figure | str:
    """Each diagnostic by layer, the mean over intervals; or why there is nothing to draw."""

    def draw(axes: Axes, run: RunData, table: Array, style: dict[str, Any]) -> None:
        axes.plot(np.arange(table.shape[1]), known_mean(table, 0), label=drawing.line_label(run.name), **style)
        axes.set_xlabel("layer")
        drawing.layer_ticks(axes.xaxis, layer_labels([str(block.get("name")) for block in _diagnosis(run)["blocks"]]))

    title = "Layer-wise effective-homogeneity diagnostics: adjacent checkpoints, mean over intervals"
    return _figure(runs, title, draw)


def measure_table(run: RunData, measure: str) -> Array:
    """[intervals, layers] of a diagnosis; NaN where it has no number, as for activations without regimes."""
    width = len(_diagnosis(run)["blocks"])
    table = np.full((len(_intervals(run)), width), np.nan)
    for row, interval in zip(table, _intervals(run), strict=True):
        values = interval.get(measure)
        if isinstance(values, list) and len(values) == width:
            row[:] = [float(value) if isinstance(value, int | float) else np.nan for value in values]
    return table


def known_mean(table: Array, axis: int) -> Array:
    """The mean of the numbers that are there; NaN, without a warning, where none is."""
    there = np.isfinite(table)
    total, count = np.where(there, table, 0).sum(axis=axis), there.sum(axis=axis)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def _figure(runs: Sequence[RunData], title: str, draw: Any) -> Figure | str:
    told = [run for run in runs if _intervals(run)]
    if not told:
        return "; ".join(drawing.gathered((run.name, _why_none(run)) for run in runs))
    with drawing.look():
        figure, axes = drawing.panels(1, 3, 9, 2.7)
        drawing.title(figure, title)
        for each, (measure, (name, unit)) in zip(axes, MEASURES.items(), strict=True):
            each.set_title(name)
            # Numbered among all runs, so that one has the same colour in every figure.
            tables = [(n, run, measure_table(run, measure)) for n, run in enumerate(runs) if _intervals(run)]
            known = [(n, run, table) for n, run, table in tables if np.isfinite(table).any()]
            if not known:
                drawing.notice(each, "No number: these activations have no finite regimes.")
                continue
            for number, run, table in known:
                draw(each, run, table, drawing.stroke(number, marked=True))
            drawing.from_zero(each)
            each.set_ylabel(unit)
        legend = max(axes, key=lambda each: len(each.get_lines()))
        missing = drawing.gathered((run.name, _why_none(run)) for run in runs if run not in told)
        drawing.below(figure, legend, [*_notes(told), *missing])
    return figure


def _notes(runs: Sequence[RunData]) -> list[str]:
    """What z were compared, and what keeps the lines from being comparable."""
    notes = [] if len(runs) > 1 else [f"Run: {runs[0].name}."]
    probes = [_diagnosis(run).get("probe") or {} for run in runs]
    same = all(probe == probes[0] for probe in probes)
    for run, probe in zip(runs, probes[:1] if same else probes, strict=False):
        tokens = probe.get("tokens")
        count = f"{tokens:,} tokens in " if isinstance(tokens, int) else ""
        whose = "" if same else f" of {run.name}"
        notes.append(f"Probe{whose}: {count}{probe.get('examples', '?')} examples of {probe.get('task', '?')}.")
    if not same:
        notes[-1] += " Different probes: compare with care."
    lengths = {interval["to"] - interval["from"] for run in runs for interval in _intervals(run)}
    if len(lengths) > 1:
        notes.append(f"Intervals of {min(lengths)} to {max(lengths)} steps: longer ones have more time to move.")
    return notes


def _why_none(run: RunData) -> str:
    return run.missing.get("diagnosis", "its diagnosis has no intervals: it needs two checkpoints")


def _diagnosis(run: RunData) -> dict[str, Any]:
    return run.diagnosis or {}


def _intervals(run: RunData) -> list[dict[str, Any]]:
    return _diagnosis(run).get("intervals") or []
