"""What the gates did: layer × step heat maps, step scales, and κ with the z that a run's gates saw under it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from nalora.control.recorded import named_activation
from nalora.report import drawing
from nalora.report.data import RunData, layer_labels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array = NDArray[np.float64]
REGIMES = {"p_sup": "suppressive", "p_res": "responsive", "p_pos": "positive"}
MASK = {
    "kept_share": "share of channels with m > 0.5",
    "stability": "change of m in a step, mean |Δm|",
}
SCALES = {"scale_gate": "gate", "scale_up": "up", "scale_down": "down"}


def regime_maps(run: RunData) -> Figure | str:
    """The share of z in each regime, layer × step; or why there are none."""
    return _maps(run, REGIMES, f"{run.name}: share of gate pre-activations in each regime", "share of z")


def mask_maps(run: RunData) -> Figure | str:
    """The share of channels that the mask keeps and how much the mask changes, layer × step."""
    return run.missing.get("mask") or _maps(run, MASK, f"{run.name}: the channel mask m", "")


def step_scales(runs: Sequence[RunData]) -> Figure | str:
    """A panel for each projection: the applied factor, every run's mean over layers, and the range of its layers."""
    told = [run for run in runs if _is_scaled(run)]
    if not told:
        return "; ".join(drawing.gathered((run.name, _why_not_scaled(run)) for run in runs))
    with drawing.look():
        figure, axes = drawing.panels(1, 3, 9, 2.7, sharey=True)
        drawing.title(figure, "Step scale of each projection: mean over layers, and the range of the layers")
        for each, (name, projection) in zip(axes, SCALES.items(), strict=True):
            each.axhline(1, color=drawing.GREY, linewidth=0.8)
            for number, run in enumerate(runs):  # of all runs, so that one has the same colour in every figure
                if run.gates is None or run not in told or not _told(run.gates.columns, name):
                    continue
                values, style = run.gates.columns[name], drawing.stroke(number)
                here = np.isfinite(values).any(axis=1)
                steps, values = run.gates.steps[here], values[here]
                each.fill_between(
                    steps,
                    np.nanmin(values, axis=1),
                    np.nanmax(values, axis=1),
                    color=style["color"],
                    alpha=0.15,
                    linewidth=0,
                )
                each.plot(steps, np.nanmean(values, axis=1), label=drawing.line_label(run.name), **style)
            each.set_title(projection)
            drawing.step_axis(each)
        axes[0].set_ylabel("step scale (1 = plain LoRA)")
        notes = drawing.gathered((run.name, _why_not_scaled(run)) for run in runs if run not in told)
        drawing.below(figure, axes[0], notes if len(told) > 1 else [f"Run: {told[0].name}.", *notes])
    return figure


def kappa_figure(run: RunData) -> Figure | str:
    """κ of the activation above, the histogram of z below, thresholds through both; a column per activation."""
    diagnosis = run.diagnosis
    if diagnosis is None:
        return run.missing.get("diagnosis", "no diagnosis")
    histogram = diagnosis.get("histogram")
    if not isinstance(histogram, dict) or not histogram.get("counts"):
        return "the diagnosis has no histogram"
    edges, counts = np.array(histogram["edges"], dtype=float), np.array(histogram["counts"], dtype=float)
    kinds: dict[str, list[int]] = {}
    for place, block in enumerate(diagnosis["blocks"]):
        kinds.setdefault(str(block.get("activation")), []).append(place)
    with drawing.look():
        figure, axes = drawing.panels(2, len(kinds), max(6.4, 4.5 * len(kinds)), 4.2, sharex="col")
        probe = diagnosis.get("probe") or {}
        of = f" of {probe['tokens']:,} tokens of {probe.get('task')}" if isinstance(probe.get("tokens"), int) else ""
        drawing.title(figure, f"{run.name}: κ where the gates are")
        for column, (name, places) in enumerate(kinds.items()):
            upper, lower = axes[column], axes[column + len(kinds)]
            bounds = diagnosis["blocks"][places[0]]
            low, high = _histogram(lower, edges, counts[:, places].sum(axis=1), histogram["steps"])
            drawn = _kappa(upper, name, low, high)
            thresholds = [bounds.get("lower"), bounds.get("upper")]
            for each in (upper, lower) if drawn else (lower,):
                for z in thresholds:
                    if z is not None:
                        each.axvline(z, color="#333333", linewidth=0.9, linestyle=(0, (4, 3)))
            if None not in thresholds:
                names = (upper if drawn else lower).secondary_xaxis("top")
                names.set_xticks(thresholds, [f"{z:+.4f}".replace("-", "−") for z in thresholds], fontsize=8)
                names.spines["top"].set_visible(False)
                names.tick_params(length=0)
            lower.set_xlabel(f"z, gate pre-activation ({len(places)} layer{'s' * (len(places) > 1)})")
            lower.set_xlim(low, high)
        axes[0].set_ylabel("κ(z)")
        axes[len(kinds)].set_ylabel("share of z per bin")
        beyond = f"z beyond ±{edges[-1]:g} are counted in the outermost bins"
        drawing.below(figure, axes[len(kinds)], [f"Histogram{of}; {beyond}. Dashed: bounds of the responsive regime."])
    return figure


def _maps(run: RunData, wanted: Mapping[str, str], title: str, unit: str) -> Figure | str:
    gates = run.gates
    if gates is None:
        return _why_no_gates(run)
    if not any(_told(gates.columns, name) for name in wanted):
        return "gates.jsonl has no numbers for " + ", ".join(wanted)
    labels = layer_labels(gates.blocks)
    with drawing.look():
        figure, axes = drawing.panels(1, len(wanted), 3.3 * len(wanted), 3.4)
        drawing.title(figure, title)
        for each, (name, what) in zip(axes, wanted.items(), strict=True):
            each.set_title(what)
            if not _told(gates.columns, name):
                drawing.notice(each, f"No numbers: the run recorded no {what}.")
                continue
            mesh = _heat_map(each, gates.steps, gates.columns[name].T)
            drawing.layer_ticks(each.yaxis, labels)
            bar = figure.colorbar(mesh, ax=each, pad=0.02)
            bar.outline.set_visible(False)
            bar.set_label(unit if each is axes[-1] else "")
            drawing.step_axis(each)
        axes[0].set_ylabel("layer")
    return figure


def _is_scaled(run: RunData) -> bool:
    recorded = run.gates is not None and any(_told(run.gates.columns, name) for name in SCALES)
    return recorded and "scaling" not in run.missing


def _why_not_scaled(run: RunData) -> str:
    return run.missing.get("scaling") or _why_no_gates(run)


def _why_no_gates(run: RunData) -> str:
    return run.missing.get("gates", "no numbers of these were recorded")


def _heat_map(axes: Axes, steps: NDArray[np.int64], values: Array) -> Any:
    """Rows of layers, the first at the bottom; columns as wide as the steps between two logged ones."""
    from matplotlib import colormaps
    from matplotlib.colors import LogNorm, Normalize

    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    # What decays over decades, as the mask's change does, shows nothing on an even scale.
    decays = low >= 0 and high > 0 and np.nanmedian(values) < high / 10
    norm = LogNorm(max(low, high / 1e3), high) if decays else Normalize(low, high if high > low else low + 1e-9)
    mesh = axes.pcolormesh(
        _edges(np.asarray(steps, dtype=float)), np.arange(len(values) + 1) - 0.5, values,
        norm=norm, cmap=colormaps["cividis"].with_extremes(bad="#eeeeee", under=colormaps["cividis"](0.0)),
        rasterized=True,
    )  # fmt: skip
    axes.grid(False)
    return mesh


def _edges(centres: Array) -> Array:
    if len(centres) == 1:
        return np.array([centres[0] - 0.5, centres[0] + 0.5])
    middles = (centres[1:] + centres[:-1]) / 2
    return np.concatenate([[2 * centres[0] - middles[0]], middles, [2 * centres[-1] - middles[-1]]])


def _told(columns: Mapping[str, Array], name: str) -> bool:
    return name in columns and bool(np.isfinite(columns[name]).any())


def _histogram(axes: Axes, edges: Array, counts: Array, steps: Sequence[int]) -> tuple[float, float]:
    """The first step filled, later ones as outlines; the range that holds all but one in 2,000."""
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    for number, (share, step) in enumerate(zip(shares, steps, strict=True)):
        if number == 0:
            axes.stairs(share, edges, fill=True, color="#c9c9c9", label=f"z at step {step}")
        else:
            axes.stairs(
                share,
                edges,
                color=drawing.COLOURS[(number - 1) % len(drawing.COLOURS)],
                linewidth=1.6,
                label=f"z at step {step}",
            )
    total = np.cumsum(shares.mean(axis=0))
    within = np.flatnonzero((total > 2.5e-4) & (total < 1 - 2.5e-4))
    low, high = (edges[within[0]], edges[min(within[-1] + 2, len(edges) - 1)]) if len(within) else (edges[0], edges[-1])
    return float(min(low, -3)), float(max(high, 3))


@torch.no_grad()
def _kappa(axes: Axes, name: str, low: float, high: float) -> bool:
    """Draw κ; False, with a notice in its place, where nalora knows no formula."""
    axes.set_title(drawing.shown(name))
    activation = named_activation(name)
    if activation is None:
        drawing.notice(axes, f"nalora has no formula for κ of {name}.")
        return False
    z = torch.linspace(low, high, 801, dtype=torch.float64)
    kappa = activation.kappa(z).numpy()
    # Far left κ falls without bound and would press the part that matters flat.
    bottom, top = max(-4.0, float(kappa.min())) - 0.2, float(kappa.max()) + 0.2
    axes.plot(*drawing.broken(z.numpy(), kappa, top - bottom), color="black", label="κ(z)")
    axes.axhline(0, color=drawing.GREY, linewidth=0.7)
    axes.set_ylim(bottom, top)
    return True
