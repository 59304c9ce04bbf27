"""Comparisons by the seeds that were added after the results of the first five were known.

Adding seeds after looking at results makes false positives more likely; the later seeds alone are free of that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tables.noise import significant_differences

from nalora.studies.questions import LOSS

FIRST_LATER = 5


def later_seeds(answers: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """List the significant differences from LoRA and from controls by the later seeds alone, study by study."""
    lines = ["- **The later seeds alone** (5 to 9, added after the results of the first five were known):"]
    for title, part in answers.items():
        measure = part["measures"].index(LOSS)
        values = {arm: _later(measures[measure]) for arm, measures in part["values"].items()}
        values = {arm: by_seed for arm, by_seed in values.items() if by_seed}
        for family in (part["comparisons"], part["controls"]):
            pairs = [(row["method"], row["baseline"]) for row in family.get(LOSS, [])]
            pairs = [pair for pair in pairs if values.keys() >= {*pair}]
            for baseline in dict.fromkeys(baseline for _, baseline in pairs):
                arms = [arm for arm, other in pairs if other == baseline]
                compared = {arm: values[arm] for arm in (*arms, baseline)}
                differences = significant_differences(compared, baseline, planned=len(pairs))
                lines.append(f"  {title}: {differences} ({_counted(len(pairs))}).")
    return lines


def _later(by_seed: Mapping[str, float]) -> dict[int, float]:
    return {int(seed): value for seed, value in by_seed.items() if int(seed) >= FIRST_LATER}


def _counted(comparisons: int) -> str:
    return "one comparison" if comparisons == 1 else f"corrected over {comparisons}"
