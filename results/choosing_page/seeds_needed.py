"""How many seeds a comparison with LoRA needs, from the spread of the stored paired differences."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from findings_page.power import differences_from_lora
from tables.arm_states import LORA
from tables.stored_answers import FULL, answer_of, values

from choosing_page.rate_losses import GRIDS
from nalora.evaluation.significance import ALPHA, FEWEST_SEEDS, seeds_to_decide
from nalora.studies.questions import LOSS

SIZES = (0.002, 0.005, 0.01, 0.02)  # of a difference in test loss


def seeds_table(results: Path) -> list[str]:
    """Return a table with the number of seeds by study and size of the difference."""
    lines = [
        f"| true difference in test loss | arms | {' | '.join(f'{size:g}' for size in SIZES)} |",
        "|---|---|" + "---|" * len(SIZES),
    ]
    for name, title in GRIDS.items():
        if by_arm := paired(results, name):
            cells = [shown(needed(by_arm, size)) for size in SIZES]
            lines.append(f"| {title} | {len(by_arm)} | {' | '.join(cells)} |")
    return lines


def paired(results: Path, name: str) -> Mapping[str, Sequence[float]]:
    """Return the differences of a study's finished arms from LoRA, by arm; empty if the study has no answer."""
    if not (results / name / "answer.json").is_file():
        return {}
    part = answer_of(results, name)
    by_arm = values(part) if LOSS in part["measures"] else {}
    arms = [arm for arm in by_arm if arm not in (LORA, FULL, *part["missing"])] if LORA in by_arm else []
    differences = differences_from_lora(by_arm, arms)
    return {arm: by_seed for arm, by_seed in differences.items() if len(by_seed) >= FEWEST_SEEDS}


def needed(by_arm: Mapping[str, Sequence[float]], size: float) -> float:
    """Return the median over the arms of the seeds that one comparison needs for a power of 80 %.

    Each arm's differences are moved to a mean of `size`, so that their spread alone counts; infinite above 10,000.
    """
    seeds = []
    for by_seed in by_arm.values():
        mean = statistics.fmean(by_seed)
        seeds.append(seeds_to_decide([size + value - mean for value in by_seed], ALPHA) or math.inf)
    return statistics.median(seeds)


def shown(seeds: float) -> str:
    """Return a number of seeds, rounded up."""
    return "> 10,000" if math.isinf(seeds) else f"{math.ceil(seeds):,}"
