"""Runs stored under a digest of their settings: a changed setting is a new run, an unchanged run is never repeated."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from nalora import tasks
from nalora.files.atomic import read_json
from nalora.runs import contents, marker, old_names
from nalora.runs.folder import HELD_OUT, INDIFFERENT, RunFolder
from nalora.runs.settings import Run
from nalora.studies.questions import is_on_other_data, questions_digest

# The names of a run's folder, of its log, and of the folder in which it is trained again.
_KEY = re.compile(r"[0-9a-f]{16}(\.log|\.again)?")
VALIDATION, TEST, ANSWERS = "validation", "test", "answers"


def key(run: Run) -> str:
    """Return the run's name in the store: a digest of all settings that its result depends on.

    Settings at their defaults are left out, so that a setting added in a later version does not change the name.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(run.settings)} | run.method.defaults()
    content = {
        name: value
        for name, value in run.to_dict().items()
        if name not in INDIFFERENT and not (name in defaults and defaults[name] == value)
    }
    content = old_names.as_in_keys(content)
    content |= {"method": run.method.name, "task": tasks.identity(run.settings.task, run.task_options), **run.deleted}
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:16]


class Result(NamedTuple):
    """A finished run: its training loss, and the results of the parts that have been evaluated."""

    train_loss: float | None
    losses: dict[str, float]
    measures: dict[str, float]
    seconds: float
    examples: int = 0
    questions: Mapping[str, str] = {}  # a digest for each part; empty where a result of 0.1 does not record it
    diverged: bool = False

    def has(self, part: str) -> bool:
        """Whether this part has been evaluated; nothing is left to evaluate of a run that diverged."""
        if self.diverged:
            return True
        return bool(self.measures) if part == ANSWERS else part in self.losses

    def has_all(self, parts: Iterable[str]) -> bool:
        """Whether all these parts have been evaluated."""
        return all(self.has(part) for part in parts)


class Store:
    """A folder of runs, each under its key."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)

    def claim(self) -> None:
        """Create the folder if it is missing, and mark it as nalora's; `NALoRAError` if it has other files."""
        self.refuse_foreign()
        marker.mark(self.root.resolve(), "store")

    def refuse_foreign(self) -> None:
        """Raise `NALoRAError` if the folder holds files that nalora did not write. Nothing is changed."""
        # A link to a larger disk is common, and nothing in a store is removed except by a run that is trained again.
        marker.refuse_foreign(self.root.resolve(), "store", option="--store", known=_is_of_0_1)

    def folder(self, name: str) -> RunFolder:
        """Return the folder of the run with that key."""
        return RunFolder(self.root / name)

    def result(self, name: str, test_limit: int | None = None) -> Result | None:
        """Return the result of a finished run, None if there is none.

        Only evaluations on the run's own task count. A study writes losses.json, which is about all questions; the
        summary.json next to it may be about fewer: its answers count if they are at least the first `test_limit`, or
        all questions. A run that diverged has an infinite loss in every part: training it again would do the same.
        """
        folder = self.folder(name)
        trained = read_json(folder.result)
        if trained is None:
            return None
        if trained.get("diverged"):
            infinite, seconds = {VALIDATION: math.inf, TEST: math.inf}, trained.get("seconds") or 0.0
            return Result(None, infinite, {}, seconds, trained.get("examples") or 0, diverged=True)
        losses: dict[str, float] = {}
        measures: dict[str, float] = {}
        questions: dict[str, str] = {}
        # The name of a task may contain a slash, which makes its folder one level deeper.
        for path in sorted(folder.evaluations.rglob("adapted-*/losses.json")):
            evaluated = read_json(path)
            if evaluated is None or evaluated.get("task") != trained.get("task") or is_on_other_data(evaluated):
                continue
            part = VALIDATION if path.parent.parent.name.endswith(HELD_OUT) else TEST
            # Tasks without one correct answer, such as conversations and programs, have no loss.
            loss = evaluated.get("target_loss")
            if loss and not (isinstance(loss, dict) and "value" in loss):
                continue  # a damaged file: this part is evaluated again
            losses[part] = _number(loss["value"]) if loss else math.nan
            questions[part] = questions_digest(evaluated)
            summary = read_json(path.with_name("summary.json"))
            count = evaluated.get("examples", 0)
            if part == TEST and summary and summary.get("examples", 0) >= min(count, test_limit or count):
                measures = {name: _number(measure["value"]) for name, measure in summary["measures"].items()}
                questions[ANSWERS] = questions_digest(summary)
        seconds, examples = trained.get("seconds", 0.0), trained.get("examples", 0)
        return Result(trained.get("train_loss"), losses, measures, seconds, examples, questions)


def _is_of_0_1(root: Path) -> bool:
    """Whether version 0.1, which wrote no marker, stored runs there."""
    keys = {entry.name.partition(".")[0] for entry in root.iterdir() if _KEY.fullmatch(entry.name)}
    return any(contents.is_run(root / name) for name in keys)


def _number(value: Any) -> float:
    """Return the number, or infinity if it is not finite: the run diverged."""
    return float(value) if value is not None and math.isfinite(value) else math.inf
