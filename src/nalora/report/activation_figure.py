"""Figure of an activation: φ, φ′ and its selection weight above, κ and χ below, with the characteristic points."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nalora.activations import Activation
from nalora.report import drawing
from nalora.report.charts import DASHES, KAPPA, Array

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

REGIME_COLOURS = ("#f6ded2", "#ffffff", "#dbe9f5")  # suppressive, responsive, positive


def draw_activation(activation: Activation, folder: Path) -> list[Path]:
    """Write the figure as PNG and SVG, named after the activation."""
    return drawing.save(activation_figure(activation), folder, file_name(activation))


def file_name(activation: Activation) -> str:
    """Return the name of the activation's files, without suffix."""
    return re.sub(r"[^\w.-]+", "-", activation.name).strip("-.") or "activation"


@torch.no_grad()
def activation_figure(activation: Activation) -> Figure:
    """Draw the activation over a range that shows the characteristic points and the tails of the curves."""
    points = activation.characteristic_points
    reach = max(3.0, 3 * max(map(abs, points))) if points else 4.0
    z = torch.linspace(-reach, reach, 1201, dtype=torch.float64)
    with drawing.style():
        figure, (upper, lower) = drawing.panels(2, 1, 6.4, 5.2, sharex=True)
        figure.suptitle(f"{activation.name}: selection and effective homogeneity", x=0.01, ha="left")
        for axes, colours, functions in (
            (upper, (0, 1, 2), {
                "φ(z)": activation.phi, "φ′(z)": activation.derivative, "s(z) = φ(z)/z": activation.selection,
            }),
            (lower, (6, 5), {"κ(z) = zφ′(z)/φ(z)": activation.kappa, "χ(z) = 1 + κ(z)": activation.chi}),
        ):  # fmt: skip
            curves = {label: function(z).numpy() for label, function in functions.items()}
            # Limits from the first two of each panel: s has a pole where φ(0) ≠ 0 (softplus).
            axes.set_ylim(*_limits(z.numpy(), list(curves.values())[:2]))
            height = float(np.ptp(axes.get_ylim()))
            for (label, values), colour, dashes in zip(curves.items(), colours, DASHES, strict=False):
                line = drawing.broken(z.numpy(), values, height)
                axes.plot(*line, color=drawing.colour(colour), linestyle=(0, dashes) if dashes else "-", label=label)
            axes.axhline(0, color=drawing.GREY, linewidth=0.7, zorder=1)
            _shade(axes, activation, reach, named=axes is lower)
        upper.set_ylabel("value")
        lower.set_ylabel("local exponent")
        lower.set_xlabel(KAPPA["x"])
        lower.set_xlim(-reach, reach)
        for axes in (upper, lower):
            axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0)
        _mark(upper, lower, activation)
    return figure


def _shade(axes: Axes, activation: Activation, reach: float, *, named: bool) -> None:
    points = activation.characteristic_points
    if points is None:
        return
    bounds = (-reach, points.lower, points.upper, reach)
    lower, upper = map(drawing.signed, points)
    texts = (f"suppressive, z < {lower}", "responsive", f"positive, z > {upper}")
    for i, (text, colour) in enumerate(zip(texts, REGIME_COLOURS, strict=True)):
        axes.axvspan(
            bounds[i], bounds[i + 1], facecolor=colour, edgecolor="#cccccc", linewidth=0.5, zorder=0,
            label=text if named else "_",
        )  # fmt: skip


def _mark(upper: Axes, lower: Axes, activation: Activation) -> None:
    """Draw the points as lines through both panels, labelled above, and as dots on κ."""
    points = activation.characteristic_points
    if points is None:
        reason = "no characteristic points: φ′ has no zero left of 0, or κ no turning point right of it"
        upper.set_title(reason, fontsize=8, color=drawing.GREY)
        return
    kappa = activation.kappa(torch.tensor(points, dtype=torch.float64))
    dots: dict[str, Any] = {"linestyle": "", "marker": "o", "markersize": 5, "color": drawing.INK, "zorder": 4}
    lower.plot(points, kappa.numpy(), label="_points", **dots)
    neighbours = activation.kappa(torch.tensor([points.upper - 0.05, points.upper + 0.05], dtype=torch.float64))
    turn = "maximum" if bool((neighbours < kappa[1]).all()) else "turning point"
    labels = [f"{drawing.signed(points.lower)}\nκ = 0", f"{drawing.signed(points.upper)}\nκ's {turn}"]
    drawing.mark_points((upper, lower), points, labels)


def _limits(z: Array, curves: list[Array]) -> tuple[float, float]:
    """Return limits for the inner half of the range: the outer half would dominate (κ of GELU falls as −z²)."""
    inner = np.concatenate([values[np.abs(z) <= z[-1] / 2] for values in curves])
    low, high = np.quantile(inner[np.isfinite(inner)], [0.005, 0.995])
    low, high = min(low, 0.0), max(high, 0.0)
    margin = 0.08 * (high - low or 1.0)
    return float(low - margin), float(high + margin)
