"""Drawing with matplotlib: one style, panels, notes and one legend below them, files as PNG and SVG."""

from __future__ import annotations

import contextlib
import io
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nalora.errors import missing_package
from nalora.files import atomic, outputs
from nalora.report.charts import COLORMAP, COLOURS, DASHES, Array, Line, LineChart, running_mean, window_of
from nalora.report.naming import brief, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKERS = "os^Dvp*X"
GREY = "#666666"
INK = "#333333"
_STYLE: dict[str, Any] = {
    "figure.facecolor": "white", "savefig.facecolor": "white", "figure.dpi": 100, "savefig.dpi": 160,
    "font.family": "DejaVu Sans", "font.size": 9,
    "axes.titlesize": 10, "axes.titlelocation": "left", "axes.labelsize": 9, "axes.edgecolor": "#444444",
    "figure.titlesize": 11, "figure.titleweight": "bold",
    "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True,
    "axes.grid": True, "grid.color": "#e4e4e4", "grid.linewidth": 0.6,
    "lines.linewidth": 1.6, "lines.markersize": 4, "legend.frameon": False, "legend.fontsize": 8,
    "image.cmap": COLORMAP.lower(), "image.interpolation": "nearest",
    # Text stays text, so that it can be searched and set in the reader's font; the same file from the same numbers.
    "svg.fonttype": "none", "svg.hashsalt": "nalora",
}  # fmt: skip


def colour(number: int) -> str:
    """Return the colour of the run or curve with that number."""
    return COLOURS["light"][number % len(COLOURS["light"])]


def stroke(number: int, *, markers: bool = False) -> dict[str, Any]:
    """Return the line style of the run with that number: colour, dashes and markers differ.

    From the ninth run on, a colour is combined with other dashes. Earlier lines are wider, so that a line stays visible
    under a later one with the same values.
    """
    place = (number + number // len(COLOURS["light"])) % len(DASHES)
    line = {
        "color": colour(number), "linestyle": (0, DASHES[place]) if DASHES[place] else "-",
        "linewidth": max(1.4, 2.8 - 0.7 * number),
    }  # fmt: skip
    return line | {"marker": MARKERS[place], "markersize": max(3.5, 7.0 - 2.5 * number)} if markers else line


def shown(text: str) -> str:
    """Return text that matplotlib draws literally: $ starts no formula."""
    return tidy(text).replace("$", r"\$")


@contextlib.contextmanager
def style() -> Iterator[None]:
    """Apply nalora's style, independent of the user's matplotlibrc; raise NALoRAError without matplotlib."""
    try:
        from matplotlib import rc_context, rcParamsDefault
    except ImportError:
        raise missing_package("figures", "matplotlib", "to draw with", "'nalora[report]'") from None

    plain: Any = {key: value for key, value in rcParamsDefault.items() if not key.startswith(("backend", "date."))}
    with rc_context(plain | _STYLE):
        yield


def panels(rows: int, columns: int, width: float, height: float, **options: Any) -> tuple[Figure, list[Axes]]:
    """Return a figure and its axes row by row; made without pyplot, so nothing has to be closed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False, **options).flat)


def notice(axes: Axes, text: str) -> None:
    """Write in an empty panel why it is empty."""
    axes.set_axis_off()
    axes.text(
        0.5, 0.5, textwrap.fill(shown(text), 44), transform=axes.transAxes, ha="center", va="center", color=GREY,
        style="italic",
    )  # fmt: skip


def title(figure: Figure, text: str) -> None:
    """Set the figure's title, top left, wrapped to its width."""
    columns = int(figure.get_figwidth() * 11)
    figure.suptitle(textwrap.fill(shown(text), columns), x=0.01, ha="left")


def below(figure: Figure, axes: Axes, notes: Sequence[str]) -> None:
    """Write notes and one legend below all panels, and make the figure higher by their height."""
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) < 2:
        handles, labels = [], []
    width = figure.get_figwidth()
    short = brief(labels)
    columns = max(1, min(len(labels), int(width * 13) // (max(map(len, short.values()), default=0) + 8)))
    full_names = [f"{form}: {label}" for label, form in short.items() if form != label]
    lines = [
        line
        for note in [*notes, *full_names]
        for line in textwrap.wrap(shown(note), int(width * 15), break_on_hyphens=False)
    ]
    if labels or lines:
        legend = figure.legend(
            handles, [shown(short[label]) for label in labels], loc="outside lower left", ncols=columns, handlelength=3,
            alignment="left", title="\n".join(lines) or None, title_fontproperties={"size": 7.5},
        )  # fmt: skip
        legend.get_title().set_color(GREY)
        rows = -(-len(labels) // columns)
        figure.set_figheight(figure.get_figheight() + 0.17 * rows + 0.14 * len(lines) + 0.15)


def broken(z: Array, values: Array, height: float) -> tuple[Array, Array]:
    """Insert a gap where the curve jumps (ReLU's κ) or has a pole, so that no line connects both sides."""
    steps = np.abs(np.diff(values, prepend=np.nan, append=np.nan))
    neighbours = np.fmax(steps[:-2], steps[2:])
    sudden = (steps[1:-1] > 0.02 * height) & (steps[1:-1] > 10 * neighbours)
    jumps = np.flatnonzero(sudden | (steps[1:-1] > height / 2)) + 1
    return np.insert(z, jumps, z[jumps]), np.insert(values, jumps, np.nan)


def draw_line(axes: Axes, chart: LineChart, number: int, name: str, line: Line) -> int:
    """Draw a run's line, as the chart describes it; return the window of its running mean, 0 without one."""
    pen, x = stroke(number, markers=chart.markers), line.x
    if isinstance(x, list):
        layer_ticks(axes.xaxis, x)
        x = np.arange(len(x), dtype=float)
    values, window = line.y, window_of(chart, line)
    if window:
        axes.plot(x, values, color=pen["color"], alpha=0.25, linewidth=0.8, label="_raw")
        values = running_mean(values, window)
    if line.low is not None and line.high is not None:
        axes.fill_between(x, line.low, line.high, color=pen["color"], alpha=0.15, linewidth=0)
    # A leading _ would keep the name out of the legend.
    axes.plot(x, values, label=f"\N{ZERO WIDTH SPACE}{name}" if name.startswith("_") else name, **pen)
    return window


def draw_axes(axes: Axes, chart: LineChart, *, layers: bool) -> None:
    """Label the axes as the chart describes them, after its lines are drawn."""
    if chart.reference is not None:
        axes.axhline(chart.reference, color=GREY, linewidth=0.8, zorder=1)
    if chart.from_zero:
        highest = axes.dataLim.y1
        axes.set_ylim(0, 1.08 * highest if highest > 0 else 1)
    if not layers:
        integer_ticks(axes)
    axes.set_xlabel(chart.x)
    axes.set_ylabel(chart.y)


def integer_ticks(axes: Axes) -> None:
    """Label the x axis, which shows steps, with integers."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))


def layer_ticks(axis: Any, labels: Sequence[str]) -> None:
    """Write the names of layers along an axis, at most nine so that none overlap."""
    places = range(0, len(labels), max(1, -(-len(labels) // 9)))
    axis.set_ticks(list(places), [shown(labels[place]) for place in places])


def mark_points(axes: Sequence[Axes], points: Sequence[float], labels: Sequence[str] = ()) -> None:
    """Draw dashed vertical lines through all panels, with labels above the first."""
    for panel in axes:
        for point in points:
            panel.axvline(point, color=INK, linewidth=0.9, linestyle=(0, (4, 3)), zorder=1.5)
    if labels:
        names = axes[0].secondary_xaxis("top")
        names.set_xticks(points, labels, fontsize=8)
        names.spines["top"].set_visible(False)
        names.tick_params(length=0)


def signed(value: float) -> str:
    """Return a number with its sign and four decimals, with a typographic minus."""
    return f"{value:+.4f}".replace("-", "−")


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write `name`.png and `name`.svg, the same bytes for the same figure; raise NALoRAError for files of others."""
    files = files_of(folder, name)
    refuse_foreign(files)
    folder.mkdir(parents=True, exist_ok=True)
    metadata: list[dict[str, Any]] = [{"Software": "nalora"}, {"Date": None, "Creator": "nalora"}]
    with style():
        for file, fields in zip(files, metadata, strict=True):
            image = io.BytesIO()
            figure.savefig(image, format=file.suffix[1:], metadata=fields)
            atomic.write(file, image.getvalue())
    return files


def files_of(folder: Path, name: str) -> list[Path]:
    """Return the paths of the figure with that name."""
    return [folder / f"{name}.{kind}" for kind in ("png", "svg")]


def refuse_foreign(files: Iterable[Path]) -> None:
    """Raise NALoRAError if one of the files exists and is not nalora's, or its folder is a symbolic link."""
    files = list(files)
    for folder in {file.parent for file in files}:
        outputs.refuse_linked_folder(folder, option="folder")
    outputs.refuse_foreign_files(files, outputs.is_figure, option="folder", kind="a figure")
