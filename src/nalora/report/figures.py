"""All figures of runs as PNG and SVG; a figure that cannot be drawn gets a sentence and leaves no empty file."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from nalora.control.recorded import named_activation
from nalora.report import drawing
from nalora.report.charts import (
    HEAT_MAPS,
    KAPPA,
    LINE_CHARTS,
    PAPER_MEASURES,
    SCALES,
    Array,
    difference_chart,
    has_numbers,
    probe_notes,
)
from nalora.report.data import RunData
from nalora.report.naming import gathered, layer_labels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class LineFigure(NamedTuple):
    """A file with one panel for each of these line charts; without a title it has that of its only chart."""

    title: str
    charts: tuple[str, ...]
    notes: Callable[[Sequence[RunData]], list[str]] = lambda runs: []


LINE_FIGURES = {
    "loss": LineFigure("", ("loss",)),
    "loss-difference": LineFigure("", ("loss",)),
    "step-scales": LineFigure("Step scale of each projection: mean over layers and range of the layers", (*SCALES,)),
    "update-norm": LineFigure("", ("update",)),
    **{
        f"diagnostics-{along}": LineFigure(
            f"{title}: adjacent checkpoints, mean over {mean}", tuple(f"{name}-{along}" for name in PAPER_MEASURES),
            probe_notes,
        )
        for along, title, mean in (
            ("over-training", "Effective-homogeneity diagnostics over training", "layers"),
            ("by-layer", "Layer-wise effective-homogeneity diagnostics", "intervals"),
        )
    },
}  # fmt: skip
# Those of every run's difference to the first run.
DIFFERENCE_FIGURES = ("loss-difference",)
HEAT_FIGURES = {
    "regimes": ("share of gate pre-activations in each regime", ("p_sup", "p_res", "p_pos")),
    "mask": ("channel mask m", ("kept_share", "stability")),
}


class Written(NamedTuple):
    """Files, and a sentence for every figure that was not drawn."""

    files: list[Path]
    skipped: list[str]


def write_figures(runs: Sequence[RunData], folder: Path) -> Written:
    """Write every figure that these runs have values for; runs share the axes of a line chart."""
    figures = {
        name: line_figure(name, runs) for name in LINE_FIGURES if len(runs) > 1 or name not in DIFFERENCE_FIGURES
    }
    for run, name in zip(runs, _file_names([run.name for run in runs]), strict=True):
        figures |= {f"{name}-{kind}": heat_figure(kind, run) for kind in HEAT_FIGURES}
        figures[f"{name}-kappa"] = kappa_figure(run)
    return _write(figures, folder)


def write_paper_figures(runs: Sequence[RunData], folder: Path) -> Written:
    """Write the paper's two diagnostic figures of these runs."""
    return _write({name: line_figure(name, runs) for name in LINE_FIGURES if name.startswith("diagnostics")}, folder)


def line_figure(name: str, runs: Sequence[RunData]) -> Figure | str:
    """Draw a panel for each chart of the figure, with a line for each run; or return why there is nothing to draw."""
    title, names, notes_on = LINE_FIGURES[name]
    charts = [LINE_CHARTS[chart] for chart in names]
    if name in DIFFERENCE_FIGURES:
        charts = [difference_chart(chart, runs[0]) for chart in charts]
    # A line is numbered among all runs, so that a run has the same colour in every figure.
    lines = [[(i, line) for i, run in enumerate(runs) if (line := chart.read(run))] for chart in charts]
    drawn = {i for panel in lines for i, _ in panel}
    absent = gathered((run.name, run.why_missing(*charts[0].topics)) for i, run in enumerate(runs) if i not in drawn)
    if not drawn:
        return "; ".join(absent)
    with drawing.style():
        size = (6.4, 3.4) if len(charts) == 1 else (9, 2.7)
        figure, axes = drawing.panels(1, len(charts), *size, sharey=charts[0].reference is not None)
        drawing.title(figure, title or charts[0].title)
        window = 0
        for panel, chart, series in zip(axes, charts, lines, strict=True):
            panel.set_title(chart.title if len(charts) > 1 else "")
            known = [(i, line) for i, line in series if np.isfinite(line.y).any()]
            if not known:
                drawing.notice(panel, "No number: these activations have no finite regimes.")
                continue
            for i, line in known:
                window = max(window, drawing.draw_line(panel, chart, i, runs[i].name, line))
            drawing.draw_axes(panel, chart, layers=isinstance(known[0][1].x, list))
            if chart.reference is not None and panel is not axes[0]:
                panel.set_ylabel("")  # the panels share the first one's
        shown = [runs[i] for i in sorted(drawn)]
        notes = [f"Run: {shown[0].name}."] if len(shown) == 1 else []
        notes += [charts[0].caption] if not title else []
        if window:
            notes.append(f"Pale: every logged step. Line: running mean over {window} logged steps.")
        legend = max(axes, key=lambda panel: len(panel.get_legend_handles_labels()[1]))
        drawing.below(figure, legend, [*notes, *notes_on(shown), *absent])
    return figure


def heat_figure(name: str, run: RunData) -> Figure | str:
    """Draw heat maps of layers by steps; or return why there is nothing to draw."""
    title, columns = HEAT_FIGURES[name]
    gates = run.gates
    if gates is None or any(topic in run.missing for topic in HEAT_MAPS[columns[0]].topics):
        return run.why_missing(*HEAT_MAPS[columns[0]].topics)
    if not any(has_numbers(run, column) for column in columns):
        return "gates.jsonl has no numbers for " + ", ".join(columns)
    with drawing.style():
        figure, axes = drawing.panels(1, len(columns), 3.3 * len(columns), 3.4)
        drawing.title(figure, f"{run.name}: {title}")
        for panel, column in zip(axes, columns, strict=True):
            panel.set_title(HEAT_MAPS[column].title)
            if not has_numbers(run, column):
                drawing.notice(panel, f"No numbers: the run recorded no {HEAT_MAPS[column].title.lower()}.")
                continue
            mesh = _heat_map(panel, gates.steps.astype(float), gates.columns[column].T)
            drawing.layer_ticks(panel.yaxis, layer_labels(gates.blocks))
            bar = figure.colorbar(mesh, ax=panel, pad=0.02)
            bar.outline.set_visible(False)
            bar.set_label(HEAT_MAPS[column].unit)
            drawing.integer_ticks(panel)
            panel.set_xlabel("step")
        axes[0].set_ylabel("layer")
    return figure


def kappa_figure(run: RunData) -> Figure | str:
    """Draw κ of the activation above the histogram of z, thresholds through both; a column per activation."""
    diagnosis = run.diagnosis
    if diagnosis is None:
        return run.why_missing("diagnosis")
    histogram = diagnosis["histogram"]
    if not histogram:
        return "the diagnosis has no histogram"
    edges, counts = np.array(histogram["edges"], dtype=float), np.array(histogram["counts"], dtype=float)
    layers_of: dict[str, list[int]] = {}
    for layer, block in enumerate(diagnosis["blocks"]):
        layers_of.setdefault(str(block.get("activation")), []).append(layer)
    columns = len(layers_of)
    with drawing.style():
        figure, axes = drawing.panels(2, columns, max(6.4, 4.5 * columns), 4.2, sharex="col")
        drawing.title(figure, f"{run.name}: κ and the distribution of z")
        for column, (activation, layers) in enumerate(layers_of.items()):
            upper, lower = axes[column], axes[column + columns]
            low, high = _histogram(lower, edges, counts[:, layers].sum(axis=1), histogram["steps"])
            both = (upper, lower) if _kappa(upper, activation, low, high) else (lower,)
            block = diagnosis["blocks"][layers[0]]
            bounds = [bound for bound in (block.get("lower"), block.get("upper")) if bound is not None]
            drawing.mark_points(both, bounds, [drawing.signed(bound) for bound in bounds] if len(bounds) == 2 else [])
            lower.set_xlabel(f"{KAPPA['x']} ({len(layers)} layer{'s' * (len(layers) > 1)})")
            lower.set_xlim(low, high)
        axes[0].set_ylabel(KAPPA["y"])
        axes[columns].set_ylabel(KAPPA["share"])
        probe = diagnosis.get("probe") or {}
        count = f" of {probe['tokens']:,} tokens of {probe.get('task')}" if isinstance(probe.get("tokens"), int) else ""
        beyond = f"z beyond ±{edges[-1]:g} are counted in the outermost bins"
        drawing.below(figure, axes[columns], [f"Histogram{count}; {beyond}. Dashed: bounds of the responsive regime."])
    return figure


def _file_names(names: Sequence[str]) -> list[str]:
    """Return the start of a file name for each run: unique, and short enough for every file system."""
    result: list[str] = []
    for name in names:
        plain = re.sub(r"[^\w.-]+", "-", name).strip("-.") or "run"
        # 255 bytes are the limit, and a letter may take four.
        plain, number = plain[:48].rstrip("-."), 2
        unique = plain
        while unique in result:
            unique, number = f"{plain}-{number}", number + 1
        result.append(unique)
    return result


def _write(figures: dict[str, Figure | str], folder: Path) -> Written:
    drawing.refuse_foreign(file for name in figures for file in drawing.files_of(folder, name))
    written = Written([], [])
    for name, figure in figures.items():
        if isinstance(figure, str):
            written.skipped.append(f"{name} was not drawn: {figure}")
        else:
            written.files.extend(drawing.save(figure, folder, name))
    return written


def _heat_map(axes: Axes, steps: Array, values: Array) -> Any:
    """Draw rows of layers, the first at the bottom; columns as wide as the steps between two logged ones."""
    from matplotlib import colormaps, rcParams
    from matplotlib.colors import LogNorm, Normalize

    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    # A linear scale hides values that decay over decades, as the mask's change does.
    decays = low >= 0 and high > 0 and np.nanmedian(values) < high / 10
    norm = LogNorm(max(low, high / 1e3), high) if decays else Normalize(low, high if high > low else low + 1e-9)
    colormap = colormaps[rcParams["image.cmap"]]
    mesh = axes.pcolormesh(
        _edges(steps), np.arange(len(values) + 1) - 0.5, values,
        norm=norm, cmap=colormap.with_extremes(bad="#eeeeee", under=colormap(0.0)), rasterized=True,
    )  # fmt: skip
    axes.grid(False)
    return mesh


def _edges(centres: Array) -> Array:
    if len(centres) == 1:
        return np.array([centres[0] - 0.5, centres[0] + 0.5])
    middles = (centres[1:] + centres[:-1]) / 2
    return np.concatenate([[2 * centres[0] - middles[0]], middles, [2 * centres[-1] - middles[-1]]])


def _histogram(axes: Axes, edges: Array, counts: Array, steps: Sequence[int]) -> tuple[float, float]:
    """Draw the first step filled, later ones as outlines; return the range of all but 0.05 % of the values."""
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    for i, (share, step) in enumerate(zip(shares, steps, strict=True)):
        style: dict[str, Any] = {"color": drawing.colour(i - 1), "linewidth": 1.6} if i else {"color": "#c9c9c9"}
        axes.stairs(share, edges, fill=i == 0, label=f"{KAPPA['data']} {step}", **style)
    total = np.cumsum(shares.mean(axis=0))
    within = np.flatnonzero((total > 2.5e-4) & (total < 1 - 2.5e-4))
    low, high = (edges[within[0]], edges[min(within[-1] + 2, len(edges) - 1)]) if len(within) else (edges[0], edges[-1])
    return float(min(low, -3)), float(max(high, 3))


@torch.no_grad()
def _kappa(axes: Axes, name: str, low: float, high: float) -> bool:
    """Draw κ; return False and write a notice where nalora has no formula."""
    axes.set_title(drawing.shown(name))
    activation = named_activation(name)
    if activation is None:
        drawing.notice(axes, f"nalora has no formula for κ of {name}.")
        return False
    z = torch.linspace(low, high, 801, dtype=torch.float64)
    kappa = activation.kappa(z).numpy()
    # For negative z, κ is not bounded below; without a limit the rest of the curve would be flat.
    bottom, top = max(-4.0, float(kappa.min())) - 0.2, float(kappa.max()) + 0.2
    axes.plot(*drawing.broken(z.numpy(), kappa, top - bottom), color="black", label=KAPPA["y"])
    axes.axhline(0, color=drawing.GREY, linewidth=0.7)
    axes.set_ylim(bottom, top)
    return True
