"""Runs addressed by their content: a changed setting is a new run, an unchanged one is never repeated."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from nalora import tasks
from nalora.runs import contents, marker
from nalora.runs.folder import HELD_OUT, INDIFFERENT, RunFolder
from nalora.runs.settings import Run
from nalora.studies.alike import asked_in, is_other_than_trained

# A run's folder is named by its key, its log and the place of its repetition likewise.
_KEY = re.compile(r"[0-9a-f]{16}(\.log|\.again)?")
VALIDATION, TEST, ANSWERS = "validation", "test", "answers"


def key(run: Run) -> str:
    """The run's name: a digest of everything that it comes out of.

    Settings at their defaults are left out, so that a setting that did not exist yet when a run was made does not
    make it another run.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(run.settings)} | run.method.defaults()
    content = {
        name: value
        for name, value in run.to_dict().items()
        if name not in INDIFFERENT and not (name in defaults and defaults[name] == value)
    }
    content |= {"method": run.method.name, "task": tasks.name_of(run.settings.task), **run.deleted}
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:16]


class Result(NamedTuple):
    """What is known of a run: the parts of it that were asked, by name."""

    train_loss: float | None
    losses: dict[str, float]
    measures: dict[str, float]
    seconds: float
    examples: int = 0
    asked: Mapping[str, str] = {}  # by part, a digest of the questions; empty where a result of 0.1 does not say
    diverged: bool = False

    def has(self, part: str) -> bool:
        """Whether this part was evaluated already; a diverged run has nothing left to evaluate."""
        if self.diverged:
            return True
        return bool(self.measures) if part == ANSWERS else part in self.losses


class Store:
    """A folder of runs, each under its key."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)

    def claim(self) -> None:
        """Make the folder where it is missing, and mark it as nalora's.

        Raises:
            NALoRAError: it holds files that nalora did not write.
        """
        self.refuse_foreign()
        marker.mark(self.root.resolve(), "store")

    def refuse_foreign(self) -> None:
        """Refuse a folder that is no store. Nothing is touched.

        Raises:
            NALoRAError: it holds files that nalora did not write.
        """
        # A link to a larger disk is common, and nothing in a store is removed but by a run that is repeated there.
        marker.refuse_foreign(self.root.resolve(), "store", option="--store", known=_is_of_0_1)

    def folder(self, name: str) -> RunFolder:
        """Where the run of that key is kept."""
        return RunFolder(self.root / name)

    def result(self, name: str, ask_limit: int | None = None) -> Result | None:
        """What is known of a finished run, None of any other.

        Only what it was asked of its own task counts. A study leaves losses.json, which is of all questions; beside it
        summary.json may be of fewer: its answers count if it is of the first `ask_limit`, or else of all. A run that
        diverged has an infinite loss in every part and is finished: training it again would give the same.
        """
        folder = self.folder(name)
        found = _read(folder.result)
        if found is None:
            return None
        if found.get("diverged"):
            infinite = {VALIDATION: math.inf, TEST: math.inf}
            return Result(None, infinite, {}, found.get("seconds") or 0.0, found.get("examples") or 0, diverged=True)
        losses: dict[str, float] = {}
        measures: dict[str, float] = {}
        asked: dict[str, str] = {}
        # A task's name may hold a slash, which makes its folder one deeper.
        for path in sorted(folder.evaluations.rglob("adapted-*/losses.json")):
            told = _read(path)
            if told is None or told.get("task") != found.get("task") or is_other_than_trained(told):
                continue
            part = VALIDATION if path.parent.parent.name.endswith(HELD_OUT) else TEST
            # No number where the task's questions have no one right answer, as a conversation or a program has not.
            loss = told.get("target_loss")
            if loss and not (isinstance(loss, dict) and "value" in loss):
                continue  # a damaged file: this part is evaluated again
            losses[part] = _number(loss["value"]) if loss else math.nan
            asked[part] = asked_in(told)
            summary = _read(path.with_name("summary.json"))
            questions = told.get("examples", 0)
            if part == TEST and summary and summary.get("examples", 0) >= min(questions, ask_limit or questions):
                measures = {name: _number(each["value"]) for name, each in summary["measures"].items()}
                asked[ANSWERS] = asked_in(summary)
        seconds, examples = found.get("seconds", 0.0), found.get("examples", 0)
        return Result(found.get("train_loss"), losses, measures, seconds, examples, asked)


def _is_of_0_1(root: Path) -> bool:
    """Whether version 0.1, which wrote no marker, kept runs there."""
    keys = {entry.name.partition(".")[0] for entry in root.iterdir() if _KEY.fullmatch(entry.name)}
    return any(contents.is_run(root / name) for name in keys)


def _read(path: Path) -> dict[str, Any] | None:
    """A JSON file's mapping; None where there is none, or a damaged one."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _number(value: Any) -> float:
    """A loss that is no number was that of a run that diverged."""
    return float(value) if value is not None and math.isfinite(value) else math.inf
