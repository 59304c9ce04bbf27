"""Descriptions of charts, from which both the page (plotly) and the image files (matplotlib) are drawn.

A description holds the title, the axis labels, the caption and the function that reads a run's values. The page
receives all of it but that function (`page_charts`), and the values by run (`report.payload`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nalora.report.data import RunData
from nalora.report.naming import brief, layer_labels

Array = NDArray[np.float64]
# Colours of runs, distinguishable without red or green, with a contrast of 3:1 or more to the page.
COLOURS = {
    "light": ("#0072b2", "#c44e00", "#00805e", "#a8447f", "#7a6000", "#2b8fc9", "#5b47c0", "#565c64"),
    "dark": ("#56b4e9", "#ff9b57", "#33c99b", "#e59ac6", "#e6c84f", "#9cc8ff", "#b7a6ff", "#c5cbd3"),
}
# Lengths of strokes and gaps, in line widths.
DASHES = ((), (4, 2), (6, 2, 1, 2), (1, 2), (6, 1, 1, 1, 1, 1), (1, 1), (8, 3), (3, 1, 1, 1))
COLORMAP = "Viridis"
# Above this number of points, the points are drawn pale with their running mean on top.
MANY_POINTS = 150


class Line(NamedTuple):
    """The values of one run along steps or layers, with the range they were averaged over where there is one."""

    x: Array | list[str]
    y: Array
    low: Array | None = None
    high: Array | None = None


@dataclass(frozen=True)
class LineChart:
    """A line for each run."""

    title: str
    x: str
    y: str
    read: Callable[[RunData], Line | None]  # returns None where the run has no values
    topics: tuple[str, ...]  # the keys of `RunData.missing` that explain why a run has none
    value: str = ""  # the name of a value in hover labels
    caption: str = ""
    from_zero: bool = False
    markers: bool = False
    smooth: bool = False  # whether many points get a running mean
    reference: float | None = None  # the value of a horizontal line


class HeatMap(NamedTuple):
    """Layers by steps, from a column of gates.jsonl."""

    title: str
    caption: str
    unit: str
    topics: tuple[str, ...] = ("gates",)


HEAT_MAPS = {
    "p_sup": HeatMap("Suppressive share", "The share of gate pre-activations that close the gate.", "share of z"),
    "p_res": HeatMap("Responsive share", "The share for which the gate responds to its input.", "share of z"),
    "p_pos": HeatMap("Positive share", "The share that passes almost unchanged.", "share of z"),
    "kept_share": HeatMap(
        "Mask density", "The share of channels that the mask keeps (m > 0.5).", "share of channels", ("gates", "mask")
    ),
    "stability": HeatMap(
        "Mask change", "Mean |Δm| at each update; 0 is a constant mask.", "mean |Δm|", ("gates", "mask")
    ),
}
SCALES = {"scale_gate": "gate", "scale_up": "up", "scale_down": "down"}
# The measures of diagnosis.json: name and unit.
MEASURES = {
    "D_sel": ("gate movement D_sel", "D_sel"),
    "flip": ("regime flip rate", "share of z"),
    "kappa_drift": ("κ drift", "mean |κ(z′) − κ(z)|"),
    "suppressive": ("suppressive crossings", "share of z"),
    "positive": ("positive crossings", "share of z"),
    "severe": ("severe jumps", "share of z"),
    "D_EH": ("homogeneity movement D_EH", "D_EH"),
    "D_EH_live": ("D_EH of live gates", "D_EH"),
}
PAPER_MEASURES = ("flip", "kappa_drift", "suppressive")
KAPPA = {"x": "z, gate pre-activation", "y": "κ(z)", "share": "share of z per bin", "data": "z at step"}


def measure_table(run: RunData, measure: str) -> Array:
    """Return [intervals, layers] of a diagnosis; NaN where it has no number, as for activations without regimes."""
    diagnosis = run.diagnosis or {"blocks": [], "intervals": []}
    width = len(diagnosis["blocks"])
    table = np.full((len(diagnosis["intervals"]), width), np.nan)
    for row, interval in zip(table, diagnosis["intervals"], strict=True):
        values = interval.get(measure)
        if isinstance(values, list) and len(values) == width:
            row[:] = [float(value) if isinstance(value, int | float) else np.nan for value in values]
    return table


def known_mean(table: Array, axis: int) -> Array:
    """Return the mean of the finite numbers; NaN, without a warning, where there is none."""
    finite = np.isfinite(table)
    total, count = np.where(finite, table, 0).sum(axis=axis), finite.sum(axis=axis)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def has_numbers(run: RunData, column: str) -> bool:
    """Whether gates.jsonl has a finite number in this column."""
    return run.gates is not None and bool(np.isfinite(run.gates.columns.get(column, np.nan)).any())


def running_mean(values: Array, window: int) -> Array:
    """Return centred means over `window` values, fewer at the ends, without values that are not finite."""
    finite = np.isfinite(values)
    count = np.convolve(finite.astype(float), np.ones(window), mode="same")
    total = np.convolve(np.where(finite, values, 0.0), np.ones(window), mode="same")
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def window_of(chart: LineChart, line: Line) -> int:
    """Return the window of the running mean; 0 for few points or a chart without one."""
    return len(line.y) // 50 if chart.smooth and len(line.y) > MANY_POINTS else 0


def _loss(run: RunData) -> Line | None:
    steps, losses = run.series("loss")
    return Line(steps, losses) if len(steps) else None


def _step_times(run: RunData) -> Line | None:
    """Seconds between rows over steps between rows; the clock of a resumed run restarts, which is no step time."""
    steps, seconds = run.series("seconds")
    times = np.diff(seconds) / np.diff(steps)
    return Line(steps[1:][times >= 0], times[times >= 0]) if (times >= 0).any() else None


def _update_norms(run: RunData) -> Line | None:
    capacity, _ = run.capacity
    if capacity is None:
        return None
    labels, norms = capacity.layer_norms()
    return Line(labels, np.array(norms))


def _kept_shares(run: RunData) -> Line | None:
    if run.gates is None or "mask" in run.missing or "kept_share" not in run.gates.columns:
        return None
    return Line(layer_labels(run.gates.blocks), run.gates.columns["kept_share"][-1])


def _mean_scale(column: str, run: RunData) -> Line | None:
    if run.gates is None or "scaling" in run.missing or not has_numbers(run, column):
        return None
    rows = np.isfinite(run.gates.columns[column]).any(axis=1)
    values = run.gates.columns[column][rows]
    steps = run.gates.steps[rows].astype(float)
    return Line(steps, np.nanmean(values, axis=1), np.nanmin(values, axis=1), np.nanmax(values, axis=1))


def _movement(measure: str, by_layer: bool, run: RunData) -> Line | None:
    if not run.diagnosis or not run.diagnosis["intervals"]:
        return None
    means = known_mean(measure_table(run, measure), 0 if by_layer else 1)
    if by_layer:
        return Line(layer_labels([str(block.get("name")) for block in run.diagnosis["blocks"]]), means)
    return Line(np.array([interval["to"] for interval in run.diagnosis["intervals"]], dtype=float), means)


def _movement_chart(measure: str, by_layer: bool) -> LineChart:
    name, unit = MEASURES[measure]
    x = "layer" if by_layer else "step (end of the interval)"
    read = partial(_movement, measure, by_layer)
    return LineChart(name, x, unit, read, ("diagnosis", "intervals"), from_zero=True, markers=True)


LINE_CHARTS = {
    "loss": LineChart(
        "Training loss", "step", "cross-entropy per target token (nats)", _loss, ("metrics", "loss"), "loss",
        "Of every logged step.", smooth=True,
    ),
    "time": LineChart(
        "Time per step", "step", "seconds per step", _step_times, ("metrics",), "seconds",
        "Wall-clock time between logged steps.", from_zero=True, smooth=True,
    ),
    "update": LineChart(
        "Update norm per layer", "layer", "Frobenius norm of s·B·A", _update_norms, ("capacity",), "update norm",
        "All adapted modules of a layer together.", from_zero=True, markers=True,
    ),
    "kept": LineChart(
        "Mask density at the last step", "layer", "share of channels", _kept_shares, ("gates", "mask"), "kept share",
        "The share of a layer's channels that the mask keeps.", from_zero=True, markers=True,
    ),
    **{
        column: LineChart(
            projection, "step", "step scale (1 = plain LoRA)", partial(_mean_scale, column), ("scaling", "gates"),
            reference=1.0,
        )
        for column, projection in SCALES.items()
    },
    **{f"{measure}-over-training": _movement_chart(measure, by_layer=False) for measure in PAPER_MEASURES},
    **{f"{measure}-by-layer": _movement_chart(measure, by_layer=True) for measure in PAPER_MEASURES},
}  # fmt: skip
PAGE_LINES = ("loss", "time", "update", "kept")
# The choice on the page, before the name of the first run.
DIFFERENCE = "the difference to"


def difference_chart(chart: LineChart, first: RunData) -> LineChart:
    """Return the chart of every run's difference to the first, for curves that hide each other."""
    return replace(
        chart,
        title=f"{chart.title}: {DIFFERENCE.removeprefix('the ')} {brief([first.name])[first.name]}",
        y="difference",
        read=partial(_difference, chart, first),
        value=f"difference in {chart.value}",
        from_zero=False,
        reference=0.0,
    )


def _difference(chart: LineChart, first: RunData, run: RunData) -> Line | None:
    """Return the run's values minus the first run's, where both have one."""
    one, other = chart.read(run), chart.read(first)
    if one is None or other is None:
        return None
    before = dict(zip(other.x, other.y, strict=True))
    both = [i for i, x in enumerate(one.x) if x in before]
    x = [one.x[i] for i in both] if isinstance(one.x, list) else one.x[both]
    return Line(x, np.array([one.y[i] - before[one.x[i]] for i in both])) if both else None


def page_charts(runs: Sequence[RunData]) -> dict[str, Any]:
    """Return the descriptions as JSON-ready values for the page's script."""
    lines = {name: asdict(LINE_CHARTS[name]) for name in PAGE_LINES}
    differences = {name: asdict(difference_chart(LINE_CHARTS[name], runs[0])) for name in PAGE_LINES}
    for line in (*lines.values(), *differences.values()):
        del line["read"]
    return {
        "lines": lines,
        "differences": differences,
        "difference": DIFFERENCE,
        "heat": {name: heat_map._asdict() for name, heat_map in HEAT_MAPS.items()},
        "measures": {measure: name for measure, (name, _) in MEASURES.items()},
        "scales": {"y": LINE_CHARTS["scale_gate"].y, "names": SCALES},
        "kappa": KAPPA,
        "colours": COLOURS,
        "colormap": COLORMAP,
        # A line on the page is 2 pixels wide.
        "dashes": [",".join(f"{2 * length}px" for length in dashes) or "solid" for dashes in DASHES],
    }


def probe_notes(runs: Sequence[RunData]) -> list[str]:
    """Describe the tokens that the diagnoses of these runs measured, and what limits their comparison."""
    probes = [(run.diagnosis or {}).get("probe") or {} for run in runs]
    same = all(probe == probes[0] for probe in probes)
    notes = []
    for run, probe in zip(runs, probes[:1] if same else probes, strict=False):
        tokens = probe.get("tokens")
        count = f"{tokens:,} tokens in " if isinstance(tokens, int) else ""
        owner = "" if same else f" of {run.name}"
        notes.append(f"Probe{owner}: {count}{probe.get('examples', '?')} examples of {probe.get('task', '?')}.")
    if not same:
        notes[-1] += " Different probes: compare with care."
    intervals = [interval for run in runs for interval in (run.diagnosis or {})["intervals"]]
    lengths = {interval["to"] - interval["from"] for interval in intervals}
    if len(lengths) > 1:
        notes.append(f"Intervals of {min(lengths)} to {max(lengths)} steps: movement grows with the length.")
    return notes
