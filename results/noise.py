"""What trainings of one and the same run say of the noise: how far they lie apart, and which verdicts hang on it.

GSM8K has a second LoRA: NA-LoRA with mask and scales off is LoRA bit for bit, with the same seeds, trained once more.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path

from collect import REPEATS, losses

from nalora.runs.folder import HELD_OUT
from nalora.studies.comparison import Comparison, compare_pairs
from nalora.studies.conduct import so_far
from nalora.studies.study import read

ALSO_LORA = "control, both off"
STUDIES = Path(__file__).parents[1] / "studies"


def repeats(store: Path) -> list[str]:
    """How far trainings of one run, with one seed, came to lie apart: the lowest and the highest of its losses."""
    apart: dict[str, list[float]] = {"validation": [], "test": []}
    found = trainings(store)
    for run in found.values():
        for asked in run[-1]:
            told = [each[asked] for each in run if asked in each]
            if len(told) > 1:
                apart["validation" if asked.endswith(HELD_OUT) else "test"].append(max(told) - min(told))
    sizes = [
        f"their {kind} losses lie {statistics.median(each):.4f} apart (median of {len(each)}; at most {max(each):.4f})"
        for kind, each in apart.items()
        if each
    ]
    return [
        f"- **How much is noise?** {len(found)} runs were trained again with the same seed:",
        f"  {', '.join(sizes)}.",
    ]


def robustness(store: Path, study: str = "gsm8k") -> list[str]:
    """What a study's verdicts would be if another training of its repeated runs counted."""
    described = read(STUDIES / f"{study}.yaml")
    progress = so_far(described, store)
    repeated = trainings(store)
    found: dict[str, dict[int, list[float]]] = {}
    for cell in progress.schedule.cells:
        rate = progress.schedule.chosen_rate(cell, progress.results)
        for job in progress.schedule.final(cell, rate) if rate is not None else []:
            run = repeated.get(job.key, [losses(store / job.key)])
            if told := [each[study] for each in run if study in each]:
                found.setdefault(cell.arm.name, {})[job.settings["seed"]] = told

    def verdicts(baseline: str, counted: Callable[[list[float]], float]) -> str:
        values = {arm: {seed: counted(told) for seed, told in seeds.items()} for arm, seeds in found.items()}
        return told_apart(values, baseline, planned=len(described.arms) - 1)

    return [
        "- **Which training counts?** Of a run that was trained twice, the second, whose answers were evaluated.",
        f"  Had the first one counted on {study}: {verdicts(described.baseline, lambda told: told[0])}.",
        f"  With the mean of a run's trainings: {verdicts(described.baseline, statistics.fmean)}.",
        f'  Beside "{ALSO_LORA}", which is LoRA with the same seeds: {verdicts(ALSO_LORA, lambda told: told[-1])}.',
    ]


def trainings(store: Path) -> dict[str, list[dict[str, float]]]:
    """The losses of every training of a run that was trained more than once, the one that counts last."""
    found: dict[str, list[dict[str, float]]] = {}
    for line in (store.parent / REPEATS).read_text(encoding="utf-8").splitlines():
        earlier = json.loads(line)
        found.setdefault(earlier["run"], []).append(earlier["losses"])
    return {run: [*each, losses(store / run)] for run, each in found.items()}


def told_apart(values: dict[str, dict[int, float]], baseline: str, planned: int) -> str:
    """Which arms can be told from the baseline after correction, and how far they are from it."""
    pairs = [(arm, baseline) for arm in values if arm != baseline]
    compared = compare_pairs(values, pairs, higher_is_better=False, planned=planned)
    found = [each for each in compared if each.verdict in ("better", "worse")]
    told = [
        f"{verdict} than {baseline}: {_listed([each for each in found if each.verdict == verdict])}"
        for verdict in ("better", "worse")
        if any(each.verdict == verdict for each in found)
    ]
    return "; ".join(told) if told else f"nothing could be told from {baseline}"


def _listed(found: list[Comparison]) -> str:
    return ", ".join(f"{each.method} ({each.difference:+.4f})" for each in found)
