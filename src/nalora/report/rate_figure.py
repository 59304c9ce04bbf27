"""Figure of short runs at several learning rates: the loss of every step, and the loss that a rule compares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from nalora.report import drawing
from nalora.report.charts import LINE_CHARTS
from nalora.report.data import RunData

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Losses above this multiple of the first step's are outside the figure: others would be a flat line.
_HIGHEST = 1.25


def draw_rates(
    runs: Mapping[float, RunData], losses: Mapping[float, float], pick: float | None, compared: str, files: Path
) -> list[Path]:
    """Write the figure as PNG and SVG; `files` is their path without a suffix. The other arguments: `rate_figure`."""
    return drawing.save(rate_figure(runs, losses, pick, compared), files.parent, files.name)


def rate_figure(
    runs: Mapping[float, RunData], losses: Mapping[float, float], pick: float | None, compared: str
) -> Figure:
    """Draw the loss against the step for every rate, and the compared loss against the rate.

    Args:
        runs: by learning rate.
        losses: the loss by which rates are compared; a rate that diverged has none.
        pick: the suggested rate, marked by a dashed line.
        compared: what is compared, such as "mean loss of steps 21–30".
    """
    chart = LINE_CHARTS["loss"]
    lines = {rate: line for rate, run in runs.items() if (line := chart.read(run)) is not None}
    with drawing.style():
        figure, (left, right) = drawing.panels(1, 2, 9, 3.4)
        drawing.title(figure, "First steps at several learning rates")
        notes = []
        for number, (rate, line) in enumerate(lines.items()):
            drawing.draw_line(left, chart, number, f"{rate:g}", line)
        if lines:
            drawing.draw_axes(left, chart, layers=False)
        left.set_title("Training loss")
        _compared(right, losses)
        if lines:
            curves = [np.asarray(line.y) for line in lines.values()]
            start, highest = max(curve[0] for curve in curves), max(curve.max() for curve in curves)
            notes += _limit((left, right), float(start), float(highest))
        right.set_title(compared[0].upper() + compared[1:])
        right.set_xlabel("learning rate")
        if pick is not None:
            drawing.mark_points([right], [pick])
            notes.append(f"Dashed: the suggested rate, {pick:g}.")
        if diverged := [f"{rate:g}" for rate in runs if rate not in losses]:
            notes.append(f"Diverged: {', '.join(diverged)}.")
        drawing.below(figure, left, notes)
    return figure


def _compared(axes: Axes, losses: Mapping[float, float]) -> None:
    rates = sorted(losses)
    axes.plot(rates, [losses[rate] for rate in rates], color=drawing.colour(0), marker="o")
    axes.set_xscale("log")
    axes.set_xticks(rates, [f"{rate:g}" for rate in rates], rotation=30, fontsize=7)
    axes.set_xticks([], minor=True)


def _limit(panels: Sequence[Axes], start: float, highest: float) -> list[str]:
    """Limit the axes to losses near that of the first step; return a note if some are above."""
    top = _HIGHEST * start
    if highest <= top:
        return []
    for axes in panels:
        low = axes.dataLim.y0
        if axes.dataLim.y1 > top > low:
            axes.set_ylim(low - 0.05 * (top - low), top)
    return [f"Losses above {top:.3g} are not shown; the highest is {highest:.3g}."]
