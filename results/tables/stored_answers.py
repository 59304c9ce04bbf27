"""The answers of the studies in results/STUDY/, and the runs that each of their arms is compared by."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from nalora.studies.conduct import so_far
from nalora.studies.questions import LOSS
from nalora.studies.study import Study, read

STUDIES = Path(__file__).parents[2] / "studies"
# The studies of the page's first table, with their titles.
TITLES = {
    "gsm8k": "GSM8K",
    "caesar": "Caesar cipher",
    "judgement": "word sorting",
    "long": "Caesar cipher, 3,000 steps",
}
FULL = "full fine-tuning"
# Its arms differ in the base; those on the base in its own precision also compare NA-LoRA with LoRA.
BASES = "fp8-base"
_OTHER_BASES = ("base", "quantise")
# The names of rows where a study has other names.
_ELSEWHERE = {
    "na-lora": "na-lora, update",
    "mean preserved": "na-lora, update, mean preserved",
    "utility": "na-lora, update, utility",
    "random channels": "control, random channels",
}
Answer = dict[str, Any]
BySeed = dict[int, float]


def answers(results: Path) -> dict[str, Answer]:
    """Return the answers of the page's studies that have been run, by the title that the page gives them."""
    return {title: answer_of(results, name) for name, title in TITLES.items() if (results / name).is_dir()}


def answer_of(results: Path, name: str) -> Answer:
    """Return the answer of a study that has one combination of settings."""
    (part,) = json.loads((results / name / "answer.json").read_text(encoding="utf-8"))
    return dict(part)


def named(arm: str) -> str:
    """Return the name of an arm in the table and the figure."""
    return _ELSEWHERE.get(arm, arm)


def values(part: Answer, measure: str = LOSS) -> dict[str, BySeed]:
    """Return the values of a measure by arm and seed."""
    place = part["measures"].index(measure)
    return {arm: {int(seed): value for seed, value in cells[place].items()} for arm, cells in part["values"].items()}


def on_plain_base(name: str) -> list[str]:
    """Return the arms of a study whose base model is neither converted nor quantised."""
    return [arm.name for arm in study(name).arms if not any(arm.settings.get(key) for key in _OTHER_BASES)]


def families(name: str, part: Answer) -> list[list[Answer]]:
    """Return the comparisons of test loss with LoRA that the study corrects together."""
    claims, rows = study(name).claims, part["comparisons"][LOSS]
    parts = ([row for row in rows if (row["method"] in claims) is claimed] for claimed in (True, False))
    return [family for family in parts if family]


@functools.cache
def study(name: str) -> Study:
    """Return a study from its file."""
    return read(STUDIES / f"{name}.yaml")


@functools.cache
def compared_runs(name: str, store: Path) -> dict[str, dict[int, str]]:
    """Return the keys of the runs at each arm's chosen learning rate, by arm and seed."""
    progress = so_far(study(name), store)
    runs: dict[str, dict[int, str]] = {}
    for cell in progress.schedule.cells:
        rate = progress.schedule.chosen_rate(cell, progress.results)
        for job in progress.schedule.final(cell, rate) if rate is not None else ():
            if job.key in progress.results:
                runs.setdefault(cell.arm.name, {})[job.settings["seed"]] = job.key
    return runs
