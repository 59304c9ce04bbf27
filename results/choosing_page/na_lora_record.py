"""How often NA-LoRA was better or worse than LoRA, and than its mask on random channels, over all stored studies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from findings_page.pooled import compared
from tables.noise import Trainings
from tables.stored_answers import BASES, TITLES, Answer, answer_of, on_plain_base, study

from choosing_page.method_choice import STUDY
from nalora.errors import counted
from nalora.studies.questions import LOSS

_CONTROLS = ("na-lora-random", "na-lora-frozen", "na-lora-off")


def na_lora(results: Path, trained: Trainings, store: Path) -> list[str]:
    """Return how NA-LoRA compares with LoRA, and with its mask on random channels, over all studies."""
    with_lora: list[tuple[str, Answer]] = []
    with_random: list[tuple[str, Answer]] = []
    for name, title in {**TITLES, STUDY: "GSM8K (equal-cost)", BASES: f"GSM8K ({BASES})"}.items():
        if not (results / name / "answer.json").is_file():
            continue
        part, arms = answer_of(results, name), {arm.name: arm.settings for arm in study(name).arms}
        own = [arm for arm in on_plain_base(name) if is_na_lora(arms[arm])]
        with_lora += [
            (title, row)
            for row in _rows(part, "comparisons")
            if row["method"] in own and "on" not in arms[row["method"]]
        ]
        with_random += [
            (title, row)
            for row in _rows(part, "controls")
            if row["method"] in own and arms[row["baseline"]]["method"] == "na-lora-random"
        ]
    return [
        f"- {_counts(with_lora, 'LoRA')}",
        f"- {_counts(with_random, 'the same mask on random channels')}",
        *_untuned(results),
        *_pooled(results, trained, store),
    ]


def _untuned(results: Path) -> list[str]:
    """Return the remark on the rate of the study of bases, if it has been run."""
    if not (results / BASES / "answer.json").is_file():
        return []
    (rate,) = study(BASES).learning_rates
    return [
        f"- `{BASES}` searched no learning rate: both have {rate:g}, which `gsm8k` chose for both with one seed "
        "([details](findings.md#at-one-rate-that-was-not-tuned))."
    ]


def _pooled(results: Path, trained: Trainings, store: Path) -> list[str]:
    """Return the verdicts on GSM8K if LoRA's baseline is the median of all its trainings."""
    _, pooled = compared(results, "gsm8k", trained, store)
    own = [arm.name for arm in study("gsm8k").arms if is_na_lora(arm.settings) and arm.name in pooled]
    worse, better = (sum(pooled[arm].verdict == verdict for arm in own) for verdict in ("worse", "better"))
    return [
        f"- With the median of all trainings of LoRA as the baseline on GSM8K, {worse} of {len(own)} forms of NA-LoRA "
        f"are worse than LoRA and {better} better: [both baselines](findings.md#loras-baseline-shown-both-ways)."
    ]


def is_na_lora(settings: Mapping[str, Any]) -> bool:
    """Whether an arm is NA-LoRA or a variant of it, and not one of its controls."""
    return settings["method"].startswith("na-lora") and settings["method"] not in _CONTROLS


def _rows(part: Answer, kind: str) -> list[Answer]:
    return [row for row in part[kind].get(LOSS, []) if row["method"] not in part["missing"]]


def _counts(rows: list[tuple[str, Answer]], baseline: str) -> str:
    verdicts = Counter(row["verdict"] for _, row in rows)
    shown = {
        verdict: ", ".join(
            f"{title}: {row['method']} {row['difference']:+.4f}" for title, row in rows if row["verdict"] == verdict
        )
        for verdict in ("better", "worse")
    }
    parts = [f"{verdict} in {verdicts[verdict]}{f' ({shown[verdict]})' if shown[verdict] else ''}" for verdict in shown]
    none = len(rows) - verdicts["better"] - verdicts["worse"]
    return (
        f"NA-LoRA and its variants compared with {baseline}, {counted(len(rows), 'comparison')}: "
        f"{', '.join(parts)}, no significant difference in {none}."
    )
