"""The picture of docs/findings.md: every arm's distance from LoRA, study by study."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tables.stored_answers import answers, named

from nalora.report.drawing import GREY, colour, panels, style, title
from nalora.studies.questions import LOSS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RESULTS = Path(__file__).parents[1]
TARGET = Path(__file__).parents[2] / "docs" / "figures" / "findings.svg"


def draw() -> Path:
    """Draw the figure and return its path."""
    shown = compared()
    arms = list(dict.fromkeys(arm for comparisons in shown.values() for arm in comparisons))
    with style():
        figure, axes = panels(1, len(shown), 2.0 + 2.4 * len(shown), 1.4 + 0.2 * len(arms))
        for axis, (study, comparisons) in zip(axes, shown.items(), strict=True):
            _lines(axis, comparisons, arms)
            axis.set_title(study)
            axis.set_yticks(range(len(arms)), arms if axis is axes[0] else [])
        figure.supxlabel("test loss minus LoRA's: left of the line is better", fontsize="medium")
        whole = all(row["whole"] for comparisons in shown.values() for row in comparisons.values())
        marks = "coloured: distinguishable after correction" + ("" if whole else "; hollow: more seeds to come")
        title(figure, f"Test loss compared with LoRA, each arm at its best rate (95 % intervals; {marks})")
        figure.savefig(TARGET, metadata={"Date": None, "Creator": "nalora", "Description": digest()})
    return TARGET


def compared() -> dict[str, dict[str, dict[str, Any]]]:
    """Return each study's comparisons with LoRA that have an interval, and whether all seeds are finished."""
    by_study = {
        title: {
            named(row["method"]): row | {"whole": row["method"] not in part["missing"]}
            for row in part["comparisons"][LOSS]
            if row["interval"] is not None
        }
        for title, part in answers(RESULTS).items()
    }
    return {title: comparisons for title, comparisons in by_study.items() if comparisons}


def digest() -> str:
    """Return a hash of everything drawn; the figure contains it, so that a test can check that it is up to date."""
    return "results " + hashlib.sha256(json.dumps(compared()).encode()).hexdigest()[:16]


def _lines(axis: Axes, comparisons: dict[str, dict[str, Any]], arms: list[str]) -> None:
    """Draw one line per arm, the first on top; the line is empty where the study does not have the arm."""
    for arm, row in comparisons.items():
        place, (low, high) = arms.index(arm), row["interval"]
        decided = row["verdict"] in ("better", "worse")
        paint = colour(1) if decided else GREY
        axis.plot([low, high], [place, place], color=paint, linewidth=2)
        inside = paint if row["whole"] else "white"
        axis.plot([row["difference"]], [place], "o", color=paint, markerfacecolor=inside, markersize=5)
    axis.axvline(0, color="black", linewidth=1)
    axis.set_ylim(len(arms) - 0.5, -0.5)
