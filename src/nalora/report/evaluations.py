"""The evaluations of runs: which summaries are of the same questions, and a label for each set of questions.

A task's name is not enough: the same task can be evaluated on other files, with other options, in another prompt
style, or on its first questions only. Summaries record what was evaluated (`evaluation.identity.Questions.described`),
and only those with the same record are compared. Summaries of 0.1 have no record. Two of them are comparable only if
the runs' folders prove it: the same ids with the same number of target tokens (losses.jsonl); the same folder of the
base model's answers, whose name is a digest of all of this; or both written by a study (which leaves losses.json) with
the same data, options and style.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nalora.errors import NALoRAError
from nalora.files import python_files
from nalora.files.atomic import json_text
from nalora.report.reading import clean_summary, is_partial, read_object
from nalora.runs.folder import HELD_OUT

# By task (or task and label) and by model, ``base`` or ``adapted``.
Evaluations = dict[str, dict[str, dict[str, Any]]]
_IDENTITY = ("questions", "options", "style", "max_new_tokens")
_NOT_RECORDED = "questions not recorded"


@dataclass(frozen=True)
class Evaluation:
    """One summary.

    Two evaluations are of the same questions if they share an entry of `evidence`, directly or through others.
    """

    task: str
    validation: bool  # whether the questions were held out of training, and choices were made with them
    model: str  # ``base`` or ``adapted``
    summary: dict[str, Any]
    folder: str
    evidence: frozenset[str]
    modified: float

    @property
    def name(self) -> str:
        """The task, marked if the questions were held out of training."""
        return f"{self.task} (validation)" if self.validation else self.task

    @property
    def evaluated(self) -> Mapping[str, Any]:
        """The summary's record of what was evaluated; empty in a summary of 0.1."""
        record = self.summary.get("evaluated")
        return record if isinstance(record, dict) else {}


def read_evaluations(folder: Path, settings: Mapping[str, Any], notices: list[str]) -> tuple[Evaluation, ...]:
    """Return all evaluations in a run's folder, those of questions held out of training last."""
    evaluations = []
    for file in sorted(folder.rglob("summary.json")) if folder.is_dir() else ():
        summary = read_object(file, notices, clean_summary)
        model = file.parent.name.rpartition("-")[0] or file.parent.name
        if summary is None or model not in ("base", "adapted"):
            continue
        place = file.parent.parent
        validation = place.name.endswith(HELD_OUT)
        task = str(summary.get("task") or place.relative_to(folder))
        task = task.removesuffix(HELD_OUT) if validation else task
        evidence = _evidence(file, task, validation, model, summary, settings)
        modified = file.stat().st_mtime
        summary |= {"folder": str(file.parent)}
        evaluations.append(Evaluation(task, validation, model, summary, file.parent.name, evidence, modified))
    return tuple(sorted(evaluations, key=lambda evaluation: (evaluation.validation, evaluation.modified)))


def label(runs: Sequence[Sequence[Evaluation]]) -> list[Evaluations]:
    """Return the evaluations of every run by name; the same name in two runs means the same questions.

    Of one set of questions the newest summary counts. A partial evaluation is ignored if there is a complete one.
    """
    current = _without_superseded(runs)
    names = {id(one): name for name, group in _named_groups(current) for one in group}
    result: list[Evaluations] = []
    for run in current:
        by_name: Evaluations = {}
        for evaluation in run:
            by_name.setdefault(names[id(evaluation)], {})[evaluation.model] = evaluation.summary
        result.append(by_name)
    return result


def separated(runs: Sequence[Sequence[Evaluation]]) -> list[str]:
    """Return a sentence for every task that was evaluated on several sets of questions."""
    by_task: dict[str, list[str]] = {}
    for name, group in _named_groups(_without_superseded(runs)):
        by_task.setdefault(group[0].name, []).append(name)
    again = " `nalora evaluate RUN` records it and reuses the stored answers."
    return [
        f"{task} was evaluated in ways that cannot be compared, shown separately: {'; '.join(sorted(names))}."
        + (again if any(_NOT_RECORDED in name for name in names) else "")
        for task, names in by_task.items()
        if len(names) > 1
    ]


def _without_superseded(runs: Sequence[Sequence[Evaluation]]) -> list[list[Evaluation]]:
    return [[evaluation for evaluation in run if not _is_superseded(evaluation, run)] for run in runs]


def _is_superseded(evaluation: Evaluation, run: Sequence[Evaluation]) -> bool:
    """Whether every model of a partial evaluation also has a complete one."""
    if not is_partial(evaluation.summary):
        return False
    same = [other for other in run if other.name == evaluation.name and _same_but_for_count(other, evaluation)]
    complete = {other.model for other in same if not is_partial(other.summary)}
    count = evaluation.summary.get("examples")
    return {other.model for other in same if other.summary.get("examples") == count} <= complete


def _same_but_for_count(one: Evaluation, other: Evaluation) -> bool:
    if one.evaluated and other.evaluated:
        return _selected(one.evaluated, _IDENTITY) == _selected(other.evaluated, _IDENTITY)
    # 0.1 names the folder of a model's answers by everything that matters but the number of questions.
    return not one.evaluated and not other.evaluated and (one.model != other.model or one.folder == other.folder)


def _selected(values: Mapping[str, Any], names: Sequence[str]) -> str:
    return json_text({name: values.get(name) for name in names}, sort_keys=True, default=str)


def _evidence(
    file: Path, task: str, validation: bool, model: str, summary: dict[str, Any], settings: Mapping[str, Any]
) -> frozenset[str]:
    examples = summary.get("examples")
    # Early summaries have no number of questions: all of them were evaluated.
    count = f"{task} {validation} {examples} {summary.get('questions', examples)}"
    evaluated = summary.get("evaluated")
    if isinstance(evaluated, dict):
        return frozenset({f"recorded {count} {_selected(evaluated, _IDENTITY)}"})
    count = f"{count} {_selected(summary, ('chance',))}"
    evidence = {f"alone {file}"}
    if model == "base":
        evidence.add(f"folder {count} {file.parent.name}")
    if digest := _digest_of_targets(file.with_name("losses.jsonl")):
        evidence.add(f"targets {count} {settings.get('model')} {digest}")
    if file.with_name("losses.json").is_file():
        evidence.add(f"study {count} {_task_settings(task, settings)}")
    return frozenset(evidence)


def _digest_of_targets(file: Path) -> str | None:
    """Return a digest of the ids and numbers of target tokens of all questions; None where none were stored."""
    try:
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        pairs = sorted((str(row["id"]), int(row["tokens"])) for row in rows)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return hashlib.sha256(json.dumps(pairs).encode()).hexdigest() if pairs else None


def _task_settings(task: str, settings: Mapping[str, Any]) -> str:
    """Return the settings that determine the questions of the run's own task."""
    from nalora import tasks

    try:
        # A report does not run a run's code: the options of a task in a Python file stay unknown.
        options = {} if python_files.split(task) else tasks.option_types(task)
    except (NALoRAError, ImportError):
        options = {}
    return _selected(settings, ("task", "data_dir", "prompt_style", *options))


def _named_groups(runs: Sequence[Sequence[Evaluation]]) -> list[tuple[str, list[Evaluation]]]:
    """Return evaluations of the same questions together, with a unique name: the task and, if needed, what differs."""
    groups = _groups([evaluation for run in runs for evaluation in run])
    names = []
    for group in groups:
        others = [other[0] for other in groups if other[0].name == group[0].name and other is not group]
        names.append(f"{group[0].name} ({_what_differs(group[0], others)})" if others else group[0].name)
    for i, name in enumerate(names):
        if names.count(name) > 1:
            names[i] = f"{name} [{groups[i][0].folder}]"
    return list(zip(names, groups, strict=True))


def _groups(evaluations: Sequence[Evaluation]) -> list[list[Evaluation]]:
    """Return evaluations that share evidence together, in the order of the first of each group."""
    groups: list[list[Evaluation]] = []
    for evaluation in evaluations:
        linked = [group for group in groups if any(evaluation.evidence & member.evidence for member in group)]
        merged = linked[0] if linked else []
        merged += [*(member for group in linked[1:] for member in group), evaluation]
        groups = [group for group in groups if not any(group is other for other in linked[1:])]
        groups += [] if linked else [merged]
    return groups


def _what_differs(evaluation: Evaluation, others: Sequence[Evaluation]) -> str:
    """Return the differences to other evaluations of the task."""
    own, rest = _described(evaluation), [_described(other) for other in others]
    different = [text for key, text in own.items() if any(other.get(key) != text for other in rest)]
    if own in rest or not different:
        digest = evaluation.evaluated.get("questions")
        different.append(f"questions {str(digest)[:6]}" if digest else _NOT_RECORDED)
    return ", ".join(different)


def _described(evaluation: Evaluation) -> dict[str, str]:
    examples, questions = evaluation.summary.get("examples"), evaluation.summary.get("questions")
    count = f"first {examples} of {questions} questions" if is_partial(evaluation.summary) else f"{examples} questions"
    evaluated = evaluation.evaluated
    if not evaluated:
        return {"recorded": _NOT_RECORDED, "count": count}
    options = evaluated.get("options")
    return {
        **({"data": f"data {evaluated['data']}"} if evaluated.get("data") else {}),
        **{f"option {k}": f"{k}={v}" for k, v in (options.items() if isinstance(options, dict) else ())},
        "style": f"{evaluated.get('style')} style",
        "tokens": f"at most {evaluated.get('max_new_tokens')} tokens",
        "count": count,
    }
