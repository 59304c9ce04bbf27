"""The figures of docs/performance.md."""

from __future__ import annotations

import csv
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

CURVES = Path(__file__).parent / "loss_curves.csv"
FIGURES = Path(__file__).parent.parent / "docs" / "figures"
# The same file from the same numbers: no date, no random ids.
plt.rcParams |= {"svg.hashsalt": "nalora", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
OURS, OTHERS, FLOOR_COLOUR = "#2b6cb0", "#a0aec0", "#c05621"


def training_step(times: dict[str, float], floor: str) -> None:
    """Draw a bar for every variant and a line at the floor."""
    variants = {name: ms for name, ms in times.items() if name != floor}
    figure, axes = plt.subplots(figsize=(7, max(2.8, 0.3 * len(variants))))
    colours = [OURS if name.startswith(("NA-LoRA", "nalora")) else OTHERS for name in variants]
    bars = axes.barh(list(variants), list(variants.values()), color=colours)
    axes.bar_label(bars, fmt="%.0f", padding=3)
    axes.invert_yaxis()
    if floor in times:
        axes.axvline(times[floor], color=FLOOR_COLOUR, linestyle="--")
        axes.text(times[floor], -0.75, f"{floor}: {times[floor]:.0f}", color=FLOOR_COLOUR, ha="center")
    axes.set_xlabel("ms per step: Llama-3.1-8B shapes, 4 × 1,024 tokens, r = 8, one H200")
    _save(figure, "training_step")


def loss_curves(path: Path) -> None:
    """Draw the losses of all variants in one plot."""
    with path.open(newline="") as file:
        points = list(csv.DictReader(file))
    figure, axes = plt.subplots(figsize=(7, 2.8))
    styles = (
        dict(linewidth=4, color=OTHERS),
        dict(linewidth=1, color="white"),
        dict(linestyle="--", color=OURS),
        dict(linestyle=":", color=FLOOR_COLOUR),
    )
    names = [name for name in points[0] if name != "step"]
    for name, style in zip(names, styles, strict=False):
        axes.plot([int(p["step"]) for p in points], [float(p[name]) for p in points], label=name, **style)
    axes.set_xlabel("step")
    axes.set_ylabel("training loss")
    axes.legend(frameon=False)
    _save(figure, "loss_curves")


def _save(figure: plt.Figure, name: str) -> None:
    FIGURES.mkdir(exist_ok=True)
    figure.savefig(FIGURES / f"{name}.svg", bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)
