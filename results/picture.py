"""The picture of docs/findings.md: every arm's distance from LoRA, study by study."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from findings import answers, named

from nalora.report.drawing import COLOURS, GREY, look, panels, title
from nalora.studies.alike import LOSS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RESULTS = Path(__file__).parent
TARGET = Path(__file__).parents[1] / "docs" / "figures" / "findings.svg"


def draw() -> Path:
    """Draw it anew; its path."""
    shown = compared()
    arms = list(dict.fromkeys(arm for comparisons in shown.values() for arm in comparisons))
    with look():
        figure, axes = panels(1, len(shown), 2.0 + 2.4 * len(shown), 1.4 + 0.2 * len(arms))
        for axis, (told, comparisons) in zip(axes, shown.items(), strict=True):
            _lines(axis, comparisons, arms)
            axis.set_title(told)
            axis.set_yticks(range(len(arms)), arms if axis is axes[0] else [])
        figure.supxlabel("test loss minus LoRA's: left of the line is better", fontsize="medium")
        whole = all(each["whole"] for comparisons in shown.values() for each in comparisons.values())
        marks = "coloured: distinguishable after correction" + ("" if whole else "; hollow: more seeds to come")
        title(figure, f"How far from LoRA, each at its best rate (95 % intervals; {marks})")
        figure.savefig(TARGET, metadata={"Date": None, "Creator": "nalora", "Description": digest()})
    return TARGET


def compared() -> dict[str, dict[str, dict[str, Any]]]:
    """The arms of each study beside LoRA, and whether all their seeds are there; with one seed there is no interval."""
    found = {
        told: {
            named(each["method"]): each | {"whole": each["method"] not in part["missing"]}
            for each in part["comparisons"][LOSS]
            if each["interval"] is not None
        }
        for told, part in answers(RESULTS).items()
    }
    return {told: comparisons for told, comparisons in found.items() if comparisons}


def digest() -> str:
    """Of all that is drawn; it stands in the picture, so that anybody can see whether that is up to date."""
    return "results " + hashlib.sha256(json.dumps(compared()).encode()).hexdigest()[:16]


def _lines(axis: Axes, comparisons: dict[str, dict[str, Any]], arms: list[str]) -> None:
    """One line for each arm, the first on top, and an empty one where this study has not asked."""
    for place, each in ((arms.index(arm), each) for arm, each in comparisons.items()):
        low, high = each["interval"]
        decided = each["verdict"] in ("better", "worse")
        colour = COLOURS[1] if decided else GREY
        axis.plot([low, high], [place, place], color=colour, linewidth=2)
        inside = colour if each["whole"] else "white"
        axis.plot([each["difference"]], [place], "o", color=colour, markerfacecolor=inside, markersize=5)
    axis.axvline(0, color="black", linewidth=1)
    axis.set_ylim(len(arms) - 0.5, -0.5)
