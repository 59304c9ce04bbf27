"""Examples for the page: questions with the expected answer and what the base model and every run answered."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nalora.evaluation.answers import Answered, main_measure, read_answers, side_by_side
from nalora.report.comparisons import base_summary
from nalora.report.data import RunData
from nalora.report.sentences import tasks_of
from nalora.tasks.text_measures import title_of

# Questions of all tasks together, characters of one text, and characters of all texts: at most about 1 MB of the page.
MOST_QUESTIONS = 200
MOST_CHARACTERS = 2_000
MOST_TEXT = 1_000_000


def examples(runs: Sequence[RunData]) -> list[dict[str, Any]]:
    """Return the examples of every task, JSON-ready; evenly spaced questions if there are too many for the page."""
    tasks = tasks_of(runs)
    return [shown for task in tasks if (shown := _of_task(runs, task, len(tasks)))]


def _of_task(runs: Sequence[RunData], task: str, tasks: int) -> dict[str, Any] | None:
    bases = {run.model: base["folder"] for run in runs if (base := base_summary(runs, run, task))}
    # A run is named by its number; a base model by its name if there are several.
    folders: dict[str, str] = {f"base: {name}" if len(bases) > 1 else "base": path for name, path in bases.items()}
    for i, run in enumerate(runs):
        if "adapted" in run.evaluations.get(task, {}):
            folders[f"run-{i}"] = run.evaluations[task]["adapted"]["folder"]
    answers = {model: read_answers(Path(folder)) for model, folder in folders.items()}
    rows = side_by_side(answers)
    if not rows:
        return None
    measure = main_measure([answer for row in rows for answer in row.values()])
    scores = [answer.scores.get(measure or "") for row in rows for answer in row.values()]
    count = min(len(rows), max(1, MOST_QUESTIONS // tasks))
    chosen = [_row(row, measure) for row in _spread(rows, count)]
    # Long answers of many runs: fewer questions.
    while len(chosen) > 1 and sum(map(_size, chosen)) > MOST_TEXT // tasks:
        chosen = list(_spread(chosen, len(chosen) // 2))
    return {
        "task": task,
        "measure": measure and title_of(measure),
        "judged": measure is not None and all(0 <= score <= 1 for score in scores if score is not None),
        "total": len(rows),
        "rows": chosen,
    }


def _spread(rows: Sequence[Any], count: int) -> Sequence[Any]:
    return [rows[i * len(rows) // count] for i in range(count)]


def _row(row: dict[str, Answered], measure: str | None) -> dict[str, Any]:
    first = next(iter(row.values()))
    question = first.question if first.question is not None else f"{first.id} (question not recorded)"
    return {
        "question": _cut("\n\n".join([question, *first.follow_ups])),
        "expected": _cut(first.expected or ""),
        "answers": {
            model: [_cut("\n\n".join(answer.outputs)), answer.scores.get(measure or "")]
            for model, answer in row.items()
        },
    }


def _size(row: dict[str, Any]) -> int:
    return len(row["question"]) + len(row["expected"]) + sum(len(text) for text, _ in row["answers"].values())


def _cut(text: str) -> str:
    """Return at most MOST_CHARACTERS of the text, without control characters."""
    shown = "".join(c if c.isprintable() or c in "\n\t" else "�" for c in text[:MOST_CHARACTERS].strip())
    return f"{shown} …" if len(text) > MOST_CHARACTERS else shown
