"""An activation drawn: φ, φ′ and its selection weight above, κ and χ below, with the characteristic points."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from nalora.activations import Activation
from nalora.report import drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array = NDArray[np.float64]
REGIMES = {"suppressive": "#f6ded2", "responsive": "#ffffff", "positive": "#dbe9f5"}


def draw_activation(activation: Activation, folder: Path) -> list[Path]:
    """Write the drawing as PNG and SVG, named after the activation."""
    return drawing.save(activation_figure(activation), folder, file_name(activation))


def file_name(activation: Activation) -> str:
    """What its files are called, without their endings."""
    return re.sub(r"[^\w.-]+", "-", activation.name).strip("-.") or "activation"


@torch.no_grad()
def activation_figure(activation: Activation) -> Figure:
    """The drawing, over a range that shows the characteristic points and where the curves go from there."""
    points = activation.characteristic_points
    reach = max(3.0, 3 * max(map(abs, points))) if points else 4.0
    z = torch.linspace(-reach, reach, 1201, dtype=torch.float64)
    with drawing.look():
        figure, (upper, lower) = drawing.panels(2, 1, 6.4, 5.2, sharex=True)
        figure.suptitle(f"{activation.name}: selection and effective homogeneity", x=0.01, ha="left")
        for axes, colours, curves in (
            (upper, drawing.COLOURS[:3], {
                "φ(z)": activation.phi, "φ′(z)": activation.derivative, "s(z) = φ(z)/z": activation.selection,
            }),
            (lower, drawing.COLOURS[6:4:-1], {
                "κ(z) = zφ′(z)/φ(z)": activation.kappa, "χ(z) = 1 + κ(z)": activation.chi,
            }),
        ):  # fmt: skip
            drawn = {label: curve(z).numpy() for label, curve in curves.items()}
            # Of each panel the first two: s has a pole where φ(0) ≠ 0 (softplus) and must not set the scale.
            axes.set_ylim(*_limits(z.numpy(), list(drawn.values())[:2]))
            height = float(np.ptp(axes.get_ylim()))
            for (label, values), colour, dashes in zip(drawn.items(), colours, drawing.DASHES, strict=False):
                axes.plot(*drawing.broken(z.numpy(), values, height), color=colour, linestyle=dashes, label=label)
            axes.axhline(0, color=drawing.GREY, linewidth=0.7, zorder=1)
            _shade(axes, activation, reach)
        upper.set_ylabel("value")
        lower.set_ylabel("local exponent")
        lower.set_xlabel("z, gate pre-activation")
        lower.set_xlim(-reach, reach)
        for axes in (upper, lower):
            axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0)
        _mark(upper, lower, activation)
    return figure


def _shade(axes: Axes, activation: Activation, reach: float) -> None:
    points = activation.characteristic_points
    if points is None:
        return
    named = axes.get_subplotspec().is_last_row()  # type: ignore[union-attr]
    bounds = (-reach, points.lower, points.upper, reach)
    texts = (f"suppressive, z < {_signed(points.lower)}", "responsive", f"positive, z > {_signed(points.upper)}")
    for i, (text, colour) in enumerate(zip(texts, REGIMES.values(), strict=True)):
        axes.axvspan(
            bounds[i], bounds[i + 1], facecolor=colour, edgecolor="#cccccc", linewidth=0.5, zorder=0,
            label=text if named else "_",
        )  # fmt: skip


def _mark(upper: Axes, lower: Axes, activation: Activation) -> None:
    """The points as lines through both panels, named above, and as dots on κ."""
    points = activation.characteristic_points
    if points is None:
        reason = "no characteristic points: φ′ has no zero left of 0, or κ no turning point right of it"
        upper.set_title(reason, fontsize=8, color=drawing.GREY)
        return
    for axes in (upper, lower):
        for point in points:
            axes.axvline(point, color="#333333", linewidth=0.9, linestyle=(0, (4, 3)), zorder=1.5)
    kappa = activation.kappa(torch.tensor(points, dtype=torch.float64))
    lower.plot(
        points, kappa.numpy(), linestyle="", marker="o", markersize=5, color="#333333", label="_points", zorder=4
    )
    beside = activation.kappa(torch.tensor([points.upper - 0.05, points.upper + 0.05], dtype=torch.float64))
    turn = "maximum" if bool((beside < kappa[1]).all()) else "turning point"
    names = upper.secondary_xaxis("top")
    names.set_xticks(points, [f"{_signed(points.lower)}\nκ = 0", f"{_signed(points.upper)}\nκ's {turn}"], fontsize=8)
    names.spines["top"].set_visible(False)
    names.tick_params(length=0)


def _signed(value: float) -> str:
    return f"{value:+.4f}".replace("-", "−")


def _limits(z: Array, curves: list[Array]) -> tuple[float, float]:
    """What the inner half of the range needs: the outer one would squeeze the points (κ of GELU falls as −z²)."""
    inner = np.concatenate([values[np.abs(z) <= z[-1] / 2] for values in curves])
    low, high = np.quantile(inner[np.isfinite(inner)], [0.005, 0.995])
    low, high = min(low, 0.0), max(high, 0.0)
    margin = 0.08 * (high - low or 1.0)
    return float(low - margin), float(high + margin)
