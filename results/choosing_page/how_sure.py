"""How far the advice of docs/choosing.md carries: what was measured, what remains after correction, what is open."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from findings_page.findings import ACCURACY, one_family
from tables.run_tables import Run
from tables.stored_answers import FULL, answer_of, answers, study, values

from choosing_page.method_choice import STUDY
from nalora.errors import counted
from nalora.evaluation.significance import ALPHA

# What is open, and the study that answers it.
OPEN = {
    "equal-cost": "the variants whose seeds are not complete",
    "equal-cost-judged": "the best variants on a second task",
    "gap-sources": "the rank, and the layers that make the gap",
    "gap-gemma": "a second small model",
    "fp8-base": "a base in FP8 or NF4",
    "rate-search": "learning rates on five tasks, at two ranks",
    "table-1": "models of 7B and 8B parameters",
    "ranks": "ranks of 7B and 8B models",
    "target-modules": "which layers should have adapters, 8B",
}
_SHOWN = {
    "model": "model",
    "rank": "r",
    "alpha": "α",
    "target_modules": "layers",
    "batch_size": "batch size",
    "epochs": "epochs",
    "optimizer": "optimizer",
    "schedule": "schedule",
    "warmup": "warm-up",
    "weight_decay": "weight decay",
    "max_norm": "gradient norm at most",
}


def measured(runs: Mapping[str, Run]) -> list[str]:
    """Return the settings that all stored runs share, and the values of those that differ."""
    runs = compared(runs)
    tasks = distinct(run.settings["task"] for run in runs.values())
    steps = [f"{int(number):,}" for number in distinct(run.result["steps"] for run in runs.values())]
    by_setting = {
        title: distinct(run.settings[name] for run in runs.values() if name in run.settings)
        for name, title in _SHOWN.items()
    }
    shown = "; ".join(f"{title} = {' or '.join(found)}" for title, found in by_setting.items() if found)
    return [f"- **Measured:** {len(runs)} runs; tasks {', '.join(tasks)}; {' or '.join(steps)} steps; {shown}."]


def scope(runs: Mapping[str, Run]) -> list[str]:
    """Return the models and the number of tasks of the compared runs."""
    runs = compared(runs)
    sizes: dict[str, int] = {}
    for run in runs.values():
        if run.settings["method"] == "full" and "trained_modules" not in run.settings:
            sizes[run.settings["model"]] = run.result["trainable_parameters"]
    models = [
        f"{model} ({sizes[model] / 1e6:.0f}M parameters)" if model in sizes else model
        for model in distinct(run.settings["model"] for run in runs.values())
    ]
    tasks = distinct(run.settings["task"] for run in runs.values())
    return [
        f"The runs are of **{counted(len(models), 'model')}**, {', '.join(models)}, on {counted(len(tasks), 'task')}."
    ]


def compared(runs: Mapping[str, Run]) -> dict[str, Run]:
    """Return the runs without those of the search for a task with a gap, whose test examples were also trained on."""
    return {key: run for key, run in runs.items() if run.study != "gap"}


def distinct(found: Iterable[Any]) -> list[str]:
    """Return the different values in order, without missing ones."""
    return [
        f"{value:g}" if isinstance(value, float) else str(value)
        for value in sorted({value for value in found if value is not None})
    ]


def remaining(results: Path) -> list[str]:
    """Return the verdicts of equal-cost that remain when all comparisons of the findings are one family."""
    family = one_family(results)
    kept = [claim for (title, claim), p in family.items() if title == STUDY and p <= ALPHA]
    return [
        f"- **Corrected over all {len(family)} comparisons of the [findings](findings.md)**, not over one study's "
        f"arms, these verdicts of `{STUDY}` remain: {'; '.join(kept) or 'none'}."
    ]


def accuracy(results: Path) -> list[str]:
    """Return how accuracy compares, where answers were generated."""
    part = next(iter(answers(results).values()))
    by_arm = values(part, ACCURACY)
    shown = ", ".join(f"{arm} {sum(by_arm[arm].values()) / len(by_arm[arm]):.1f} %" for arm in ("lora", FULL))
    text = f"- **Losses, not answers.** Differences are in test loss. Accuracy on GSM8K is low for this model: {shown}"
    if study(STUDY).generate == "none":
        text += f"; `{STUDY}` generated no answers"
        part = answer_of(results, STUDY)
        shared = [arm for arm, found in values(part, ACCURACY).items() if found] if ACCURACY in part["measures"] else []
        if shared:
            text += f" of its own (its accuracies of {', '.join(shared)} are of runs that it shares with `gsm8k`)"
    return [f"{text}. What a difference in loss means for the answers of a larger model has not been measured."]


def open_questions(results: Path) -> list[str]:
    """Return the studies whose answers would change the page, and their state."""
    lines = ["| not known yet | study | state |", "|---|---|---|"]
    for name, question in OPEN.items():
        link = f"[`{name}`](../src/nalora/runs/recipes/studies/{name}.yaml)"
        lines.append(f"| {question} | {link} | {state(results, name)} |")
    return lines


def state(results: Path, name: str) -> str:
    """Return how much of a study has been run."""
    file = results / name / "answer.json"
    if not file.is_file():
        return "has not run"
    parts = json.loads(file.read_text(encoding="utf-8"))
    total = len(study(name).arms) * len(parts)
    done = total - sum(len(part["missing"]) for part in parts)
    return "is finished" if done == total else f"has {done} of {total} arms finished"
