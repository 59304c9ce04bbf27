"""What the seeds say by themselves that were added after a look at the first five, as two of the studies tell.

Whoever looks, adds and looks again claims more than he may: these nobody had seen when it was decided to run them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from noise import told_apart

from nalora.studies.alike import LOSS

FIRST_LATER = 5


def later_seeds(answers: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Which arms are told from LoRA, and from their controls, by the later seeds alone; study by study."""
    lines = ["- **The later seeds alone**, from 5 on, decided upon after a look at the first five:"]
    for told, part in answers.items():
        measure = part["measures"].index(LOSS)
        values = {arm: _later(measures[measure]) for arm, measures in part["values"].items()}
        values = {arm: by_seed for arm, by_seed in values.items() if by_seed}
        for family in (part["comparisons"], part["controls"]):
            pairs = [(each["method"], each["baseline"]) for each in family.get(LOSS, [])]
            pairs = [pair for pair in pairs if values.keys() >= {*pair}]
            for baseline in dict.fromkeys(baseline for _, baseline in pairs):
                arms = [arm for arm, beside in pairs if beside == baseline]
                compared = {arm: values[arm] for arm in (*arms, baseline)}
                found = told_apart(compared, baseline, planned=len(pairs))
                lines.append(f"  {told}: {found} ({_counted(len(pairs))}).")
    return lines


def _later(by_seed: Mapping[str, float]) -> dict[int, float]:
    return {int(seed): value for seed, value in by_seed.items() if int(seed) >= FIRST_LATER}


def _counted(comparisons: int) -> str:
    return "one comparison" if comparisons == 1 else f"corrected over {comparisons}"
