"""Draw docs/figures/findings.svg: every arm's distance from LoRA, study by study.

python results/picture.py
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from findings import answers

from nalora.report.drawing import COLOURS, GREY, look, panels, title
from nalora.studies.answer import LOSS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STORE = Path(__file__).parent / "store"
TARGET = Path(__file__).parents[1] / "docs" / "figures" / "findings.svg"


def main() -> None:
    shown = compared()
    with look():
        figure, axes = panels(1, len(shown), 4.0 * len(shown), 3.6)
        for axis, (told, comparisons) in zip(axes, shown.items(), strict=True):
            draw(axis, comparisons)
            axis.set_title(told)
            axis.set_xlabel("test loss, difference to LoRA")
        title(figure, "How far from LoRA, each at its best rate: 95 % intervals over seeds; coloured: distinguishable")
        figure.savefig(TARGET, metadata={"Date": None, "Creator": "nalora", "Description": digest()})
    print(TARGET)


def compared() -> dict[str, list[dict[str, Any]]]:
    """The arms of each study that have all their seeds, beside LoRA."""
    return {
        told: [each for each in part["comparisons"][LOSS] if each["method"] not in part["missing"]]
        for told, part in answers(STORE).items()
    }


def digest() -> str:
    """Of all that is drawn; it stands in the picture, so that anybody can see whether that is up to date."""
    return "results " + hashlib.sha256(json.dumps(compared()).encode()).hexdigest()[:16]


def draw(axis: Axes, comparisons: list[dict[str, Any]]) -> None:
    """One line for each arm, the first on top."""
    for place, each in enumerate(comparisons):
        low, high = each["interval"]
        decided = each["verdict"] in ("better", "worse")
        colour = COLOURS[1] if decided else GREY
        axis.plot([low, high], [place, place], color=colour, linewidth=2)
        axis.plot([each["difference"]], [place], "o", color=colour, markersize=6)
    axis.axvline(0, color="black", linewidth=1)
    axis.set_yticks(range(len(comparisons)), [each["method"] for each in comparisons])
    axis.set_ylim(len(comparisons) - 0.5, -0.5)


if __name__ == "__main__":
    main()
