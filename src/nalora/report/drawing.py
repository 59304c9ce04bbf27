"""The look of every figure: one style, colours that the colour-blind and a grey print tell apart, PNG and SVG."""

from __future__ import annotations

import contextlib
import io
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from nalora.errors import missing_package
from nalora.files import atomic, outputs
from nalora.report.naming import brief, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's, without the yellow that vanishes on white; neighbours differ in lightness too.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#8A5A00", "#000000", "#E69F00")
DASHES = ("-", "--", "-.", ":", (0, (6, 1, 1, 1, 1, 1)), (0, (1, 1)), (0, (8, 3)), (0, (3, 1, 1, 1)))
MARKERS = "os^Dvp*X"
GREY = "#666666"
Array = NDArray[np.float64]
_STYLE: dict[str, Any] = {
    "figure.facecolor": "white", "savefig.facecolor": "white", "figure.dpi": 100, "savefig.dpi": 160,
    "font.family": "DejaVu Sans", "font.size": 9,
    "axes.titlesize": 10, "axes.titlelocation": "left", "axes.labelsize": 9, "axes.edgecolor": "#444444",
    "figure.titlesize": 11, "figure.titleweight": "bold",
    "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True,
    "axes.grid": True, "grid.color": "#e4e4e4", "grid.linewidth": 0.6,
    "lines.linewidth": 1.6, "lines.markersize": 4, "legend.frameon": False, "legend.fontsize": 8,
    "image.cmap": "cividis", "image.interpolation": "nearest",
    # Text stays text, so that it can be searched and set in the reader's font; the same file from the same numbers.
    "svg.fonttype": "none", "svg.hashsalt": "nalora",
}  # fmt: skip


def stroke(number: int, *, marked: bool = False) -> dict[str, Any]:
    """How the line with that number is told from the others: by colour, and without colour by dashes and markers.

    Beyond eight colours the dashes go on changing. Earlier lines are broader, so that runs that do the same, which is
    common, do not hide one another.
    """
    place = (number + number // len(COLOURS)) % len(DASHES)
    style = {
        "color": COLOURS[number % len(COLOURS)], "linestyle": DASHES[place], "linewidth": max(1.4, 2.8 - 0.7 * number)
    }  # fmt: skip
    return style | {"marker": MARKERS[place], "markersize": max(3.5, 7.0 - 2.5 * number)} if marked else style


def shown(text: str) -> str:
    """Text that matplotlib draws as it is: $ begins no formula."""
    return tidy(text).replace("$", r"\$")


def line_label(name: str) -> str:
    """The label of a line: a leading _ would keep it out of the legend."""
    return f"\N{ZERO WIDTH SPACE}{name}" if name.startswith("_") else name


@contextlib.contextmanager
def look() -> Iterator[None]:
    """The style, whatever the user's own matplotlibrc says.

    Raises:
        NALoRAError: matplotlib is not installed.
    """
    try:
        from matplotlib import rc_context, rcParamsDefault
    except ImportError:
        raise missing_package("figures", "matplotlib", "to draw with", "'nalora[report]'") from None

    plain: Any = {key: value for key, value in rcParamsDefault.items() if not key.startswith(("backend", "date."))}
    with rc_context(plain | _STYLE):
        yield


def panels(rows: int, columns: int, width: float, height: float, **options: Any) -> tuple[Figure, list[Axes]]:
    """A figure with its axes row by row; made without pyplot, so nothing has to be closed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **options)
    return figure, [each for row in axes for each in row]


def notice(axes: Axes, text: str) -> None:
    """Say in the place of a chart why there is none."""
    axes.set_axis_off()
    axes.text(
        0.5, 0.5, textwrap.fill(shown(text), 44), transform=axes.transAxes, ha="center", va="center", color=GREY,
        style="italic",
    )  # fmt: skip


def title(figure: Figure, text: str) -> None:
    """What the figure shows, top left; short lines, so that a narrow figure holds them."""
    columns = int(figure.get_figwidth() * 11)
    figure.suptitle(textwrap.fill(shown(text), columns), x=0.01, ha="left")


def below(figure: Figure, axes: Axes, notes: Sequence[str]) -> None:
    """Under all panels, where neither covers data: what the reader should know, then one legend for all of them.

    The figure grows by what that takes, so that the panels keep their height however many runs there are.
    """
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) < 2:
        handles, labels = [], []
    width = figure.get_figwidth()
    short = brief(labels)
    columns = max(1, min(len(labels), int(width * 13) // (max(map(len, short.values()), default=0) + 8)))
    whole = [f"{form}: {label}" for label, form in short.items() if form != label]
    lines = [
        line
        for note in [*notes, *whole]
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


def gathered(reasons: Iterable[tuple[str, str]]) -> list[str]:
    """One sentence for all names with the same reason."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons:
        names.setdefault(reason, []).append(name)
    return [f"{', '.join(each)}: {reason}" for reason, each in names.items()]


def broken(z: Array, values: Array, height: float) -> tuple[Array, Array]:
    """A gap where the curve jumps (ReLU's κ) or passes a pole, where a line would show a slope that is none."""
    steps = np.abs(np.diff(values, prepend=np.nan, append=np.nan))
    around = np.fmax(steps[:-2], steps[2:])
    sudden = (steps[1:-1] > 0.02 * height) & (steps[1:-1] > 10 * around)
    jumps = np.flatnonzero(sudden | (steps[1:-1] > height / 2)) + 1
    return np.insert(z, jumps, z[jumps]), np.insert(values, jumps, np.nan)


def from_zero(axes: Axes) -> None:
    """Let the y axis begin at 0 and end above the highest point with its marker."""
    highest = axes.dataLim.y1
    axes.set_ylim(0, 1.08 * highest if highest > 0 else 1)


def step_axis(axes: Axes) -> None:
    """Steps along x: whole numbers."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
    axes.set_xlabel("step")


def layer_ticks(axis: Any, labels: Sequence[str]) -> None:
    """Names of layers along an axis, at most nine so that none overlap."""
    every = max(1, -(-len(labels) // 9))
    places = range(0, len(labels), every)
    axis.set_ticks(list(places), [shown(labels[place]) for place in places])


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write `name`.png and `name`.svg; the same bytes for the same figure.

    Raises:
        NALoRAError: one of them is a file that nalora did not write.
    """
    files = files_of(folder, name)
    refuse_foreign(files)
    folder.mkdir(parents=True, exist_ok=True)
    metadata: list[dict[str, Any]] = [{"Software": "nalora"}, {"Date": None, "Creator": "nalora"}]
    with look():
        for file, said in zip(files, metadata, strict=True):
            drawn = io.BytesIO()
            figure.savefig(drawn, format=file.suffix[1:], metadata=said)
            atomic.write(file, drawn.getvalue())
    return files


def files_of(folder: Path, name: str) -> list[Path]:
    """The files of a figure of that name."""
    return [folder / f"{name}.{kind}" for kind in ("png", "svg")]


def refuse_foreign(files: Iterable[Path]) -> None:
    """Refuse to draw over files that nalora did not write, or into a folder that is a symbolic link.

    Raises:
        NALoRAError: one of them is such a file, or the folder is.
    """
    files = list(files)
    for folder in {file.parent for file in files}:
        outputs.refuse_linked_folder(folder, option="folder")
    outputs.refuse_foreign_files(files, outputs.is_figure, option="folder", kind="a figure")
