"""The smallest effect that each study could find, in loss and as a share of the gap to full fine-tuning."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path

from tables.noise import Trainings
from tables.stored_answers import FULL, TITLES, BySeed, answer_of, families, values

from findings_page.pooled import compared
from nalora.evaluation.significance import ALPHA, smallest_effect

LORA = "lora"


def power(results: Path, trained: Trainings, store: Path) -> list[str]:
    """Return a table with a row for every family of comparisons and number of seeds."""
    lines = [
        "| study | comparisons | seeds | smallest effect: median of the arms (lowest … highest) | share of the gap |",
        "|---|---|---|---|---|",
    ]
    for name, title in TITLES.items():
        part = answer_of(results, name)
        by_arm = values(part)
        for family in families(name, part):
            differences = differences_from_lora(by_arm, [row["method"] for row in family])
            lines += _rows(title, differences, len(family), _gap(part))
        if name == "gsm8k":
            _, pooled = compared(results, name, trained, store)
            differences = {arm: list(row.differences) for arm, row in pooled.items()}
            lines += _rows(f"{title}, all trainings", differences, len(family), -pooled[FULL].difference)
    return lines


def differences_from_lora(by_arm: Mapping[str, BySeed], arms: Iterable[str]) -> dict[str, list[float]]:
    """Return the differences of arms from LoRA, paired by seed."""
    lora = by_arm[LORA]
    return {arm: [by_arm[arm][seed] - lora[seed] for seed in sorted(by_arm[arm].keys() & lora.keys())] for arm in arms}


def _rows(title: str, differences: dict[str, list[float]], comparisons: int, gap: float | None) -> list[str]:
    effects: dict[int, list[float]] = {}
    for arm, by_seed in differences.items():
        if arm != FULL:
            effects.setdefault(len(by_seed), []).append(smallest_effect(by_seed, ALPHA / comparisons))
    rows = []
    for seeds, sizes in sorted(effects.items(), reverse=True):
        middle = statistics.median(sizes)
        shown = f"{middle:.4f} ({min(sizes):.4f} … {max(sizes):.4f})"
        share = f"{middle / gap:.0%} of {gap:.4f}".replace("%", " %") if gap else "no full fine-tuning"
        rows.append(f"| {title} | {comparisons} | {seeds} | {shown} | {share} |")
    return rows


def _gap(part: dict[str, object]) -> float | None:
    """Return how much lower the test loss of full fine-tuning is, over the seeds that it shares with LoRA."""
    by_arm = values(part)
    if FULL not in by_arm:
        return None
    return statistics.fmean(by_arm[LORA][seed] - loss for seed, loss in by_arm[FULL].items())
