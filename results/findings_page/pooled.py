"""LoRA's baseline from one run per seed, and from all trainings of LoRA: the verdicts of both.

The rule is in the head of studies/gsm8k.yaml: the value of a method for a seed is the median test loss of all its
trainings at its chosen rate with that seed. NA-LoRA with mask and scales off is LoRA bit for bit and belongs to it.
"""

from __future__ import annotations

import statistics
from pathlib import Path

from tables.noise import Trainings
from tables.stored_answers import TITLES, BySeed, answer_of, compared_runs, study

from nalora.evaluation.significance import Comparison, compare_methods

ALSO_LORA = "control, both off"
LORA = "lora"


def both_ways(results: Path, trained: Trainings, store: Path) -> list[str]:
    """Return the table of GSM8K, where LoRA was trained repeatedly, and a sentence for the other studies."""
    single, pooled = compared(results, "gsm8k", trained, store)
    lines = [
        "| GSM8K, test loss | one run per seed: difference | p | verdict | all trainings: difference | p | verdict |",
        "|---|---|---|---|---|---|---|",
    ]
    for arm, row in single.items():
        other = pooled.get(arm)
        cells = [*_cells(row), *(_cells(other) if other else ("", "", "is LoRA"))]
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    return [*lines, "", *_elsewhere(results, trained, store)]


def compared(
    results: Path, name: str, trained: Trainings, store: Path
) -> tuple[dict[str, Comparison], dict[str, Comparison]]:
    """Return the comparisons with LoRA by arm: with the run that counts, and with all trainings."""
    losses = trained_losses(name, trained, store)
    counted = {arm: {seed: runs[-1] for seed, runs in seeds.items()} for arm, seeds in losses.items()}
    return _comparisons(name, counted), _comparisons(name, pooled_values(results, name, losses))


def pooled_values(results: Path, name: str, losses: dict[str, dict[int, list[float]]]) -> dict[str, BySeed]:
    """Return the median of all trainings by arm and seed; those of `ALSO_LORA` at LoRA's rate are LoRA's."""
    rates = answer_of(results, name)["learning_rates"]
    merged = {arm: {seed: list(runs) for seed, runs in seeds.items()} for arm, seeds in losses.items()}
    if ALSO_LORA in merged and rates[ALSO_LORA] == rates[LORA]:
        for seed, runs in merged.pop(ALSO_LORA).items():
            merged[LORA].setdefault(seed, []).extend(runs)
    return {arm: {seed: statistics.median(runs) for seed, runs in seeds.items()} for arm, seeds in merged.items()}


def trained_losses(name: str, trained: Trainings, store: Path) -> dict[str, dict[int, list[float]]]:
    """Return the test losses of all trainings of the compared runs, the one that counts last."""
    task = study(name).settings["task"]
    losses: dict[str, dict[int, list[float]]] = {}
    for arm, runs in compared_runs(name, store).items():
        for seed, key in runs.items():
            if known := [training[task] for training in trained[key] if task in training]:
                losses.setdefault(arm, {})[seed] = known
    return losses


def _comparisons(name: str, by_seed: dict[str, BySeed]) -> dict[str, Comparison]:
    """Compare with LoRA in the families of the study; the number of comparisons is the planned one."""
    claims = study(name).claims
    rows: list[Comparison] = []
    for claimed in (True, False):
        planned = [arm.name for arm in study(name).arms[1:] if (arm.name in claims) is claimed]
        pairs = [(arm, LORA) for arm in planned if arm in by_seed]
        rows += compare_methods(by_seed, pairs, higher_is_better=False, planned=len(planned)) if pairs else []
    return {row.method: row for row in rows}


def _elsewhere(results: Path, trained: Trainings, store: Path) -> list[str]:
    """Return a sentence about each other study: the number of runs trained again, and verdicts that pooling changes."""
    parts = []
    for name, title in TITLES.items():
        if name == "gsm8k":
            continue
        losses = trained_losses(name, trained, store)
        again = sum(len(runs) > 1 for seeds in losses.values() for runs in seeds.values())
        single, pooled = compared(results, name, trained, store)
        changed = [f"{arm} {pooled[arm].verdict}" for arm in single if single[arm].verdict != pooled[arm].verdict]
        parts.append(f"{title}: {again} of the compared runs trained again, {', '.join(changed) or 'same verdicts'}")
    return [f"The other studies, pooled in the same way: {'; '.join(parts)}."]


def _cells(row: Comparison) -> tuple[str, str, str]:
    p = "" if row.adjusted_p is None else f"{row.adjusted_p:.2g}"
    verdict = f"**{row.verdict}**" if row.verdict in ("better", "worse") else "–"
    return f"{row.difference:+.4f}", p, verdict
