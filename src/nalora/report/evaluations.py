"""The evaluations of runs: which summaries are of the same questions, and a label for each set that tells it apart.

A task's name is not enough: the same task can be evaluated on other files, with other options, in another prompt
style, or on its first questions alone. Summaries say what they are of (`evaluation.identity.Questions.described`), and
only those of the same are put side by side. Summaries of 0.1 do not say it. Two of them count as alike only where the
runs' folders show it: the same ids with the same number of target tokens (losses.jsonl); the same base model's folder
of answers, whose name is a digest of all of this; or both written by a study (which leaves losses.json) with the same
data, options and style.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nalora.files.atomic import json_text
from nalora.report.cleaning import clean_summary, is_partial
from nalora.runs.folder import HELD_OUT

# By task (or task and label) and by who was evaluated, ``base`` or ``adapted``.
Evaluations = dict[str, dict[str, dict[str, Any]]]
_ALIKE = ("questions", "options", "style", "max_new_tokens")
_NOT_RECORDED = "questions not recorded"


@dataclass(frozen=True)
class Evaluation:
    """One summary.

    Attributes:
        task: the task's name.
        validation: whether the questions were held out of training, so that choices were made by them.
        who: ``base`` or ``adapted``.
        summary: its numbers.
        folder: the name of its folder.
        evidence: what shows which questions these are: alike are two that share an entry, or that are linked so.
        modified: when it was written.
    """

    task: str
    validation: bool
    who: str
    summary: dict[str, Any]
    folder: str
    evidence: frozenset[str]
    modified: float

    @property
    def name(self) -> str:
        """The task, and whether it is what was held out of training."""
        return f"{self.task} (validation)" if self.validation else self.task

    @property
    def evaluated(self) -> Mapping[str, Any]:
        """What the summary says that it is of; empty for one of 0.1."""
        found = self.summary.get("evaluated")
        return found if isinstance(found, dict) else {}


def read_evaluations(
    folder: Path, settings: Mapping[str, Any], summaries: Iterable[tuple[Path, dict[str, Any]]]
) -> tuple[Evaluation, ...]:
    """All evaluations of a run, those of what was held out of training last.

    Args:
        folder: the run's folder of evaluations.
        settings: the run's.
        summaries: the files, and what is in them.
    """
    found = []
    for file, summary in summaries:
        who = file.parent.name.rpartition("-")[0] or file.parent.name
        if who not in ("base", "adapted"):
            continue
        place = file.parent.parent
        validation = place.name.endswith(HELD_OUT)
        task = str(summary.get("task") or place.relative_to(folder))
        task = task.removesuffix(HELD_OUT) if validation else task
        clean = clean_summary(summary)
        evidence = _evidence(file, task, validation, who, clean, settings)
        found.append(Evaluation(task, validation, who, clean, file.parent.name, evidence, file.stat().st_mtime))
    return tuple(sorted(found, key=lambda each: (each.validation, each.modified)))


def label(runs: Sequence[Sequence[Evaluation]]) -> list[Evaluations]:
    """The evaluations of every run by name; the same name in two runs means the same questions.

    Of one set of questions the newest summary counts. A quick look at the first questions is left out where there is
    an evaluation of all of them.
    """
    kept = _without_superseded(runs)
    sets = _sets([each for run in kept for each in run])
    names = _names(sets)
    places = {id(each): place for place, alike in enumerate(sets) for each in alike}
    result: list[Evaluations] = []
    for run in kept:
        named: Evaluations = {}
        for each in run:
            named.setdefault(names[places[id(each)]], {})[each.who] = each.summary
        result.append(named)
    return result


def separated(runs: Sequence[Sequence[Evaluation]]) -> list[str]:
    """A sentence for every task of which several sets of questions were evaluated."""
    sets = _sets([each for run in _without_superseded(runs) for each in run])
    names = _names(sets)
    by_task: dict[str, list[str]] = {}
    for alike, name in zip(sets, names, strict=True):
        by_task.setdefault(alike[0].name, []).append(name)
    again = " `nalora evaluate RUN` records it; answers that are there are not written again."
    return [
        f"{task} was evaluated in ways that cannot be compared, shown separately: {'; '.join(sorted(listed))}."
        + (again if any(_NOT_RECORDED in name for name in listed) else "")
        for task, listed in by_task.items()
        if len(listed) > 1
    ]


def _without_superseded(runs: Sequence[Sequence[Evaluation]]) -> list[list[Evaluation]]:
    return [[each for each in run if not _is_superseded(each, run)] for run in runs]


def _is_superseded(each: Evaluation, run: Sequence[Evaluation]) -> bool:
    """Whether a partial evaluation is one of questions that everybody in it has been asked completely."""
    if not is_partial(each.summary):
        return False
    same = [other for other in run if other.name == each.name and _alike_but_for_count(other, each)]
    whole = {other.who for other in same if not is_partial(other.summary)}
    partial = {other.who for other in same if other.summary.get("examples") == each.summary.get("examples")}
    return partial <= whole


def _alike_but_for_count(one: Evaluation, other: Evaluation) -> bool:
    if one.evaluated and other.evaluated:
        return _key(one.evaluated) == _key(other.evaluated)
    # 0.1 names the folder of a model's answers by all that matters but the number of questions.
    return not one.evaluated and not other.evaluated and (one.who != other.who or one.folder == other.folder)


def _key(evaluated: Mapping[str, Any]) -> str:
    return json_text({name: evaluated.get(name) for name in _ALIKE}, sort_keys=True, default=str)


def _evidence(
    file: Path, task: str, validation: bool, who: str, summary: dict[str, Any], settings: Mapping[str, Any]
) -> frozenset[str]:
    examples = summary.get("examples")
    # Early summaries do not say how many questions there are: all of them were asked.
    count = f"{task} {validation} {examples} {summary.get('questions', examples)}"
    evaluated = summary.get("evaluated")
    if isinstance(evaluated, dict):
        return frozenset({f"said {count} {_key(evaluated)}"})
    count = f"{count} {json_text(summary.get('chance'), sort_keys=True, default=str)}"
    found = {f"alone {file}"}
    if who == "base":
        found.add(f"folder {count} {file.parent.name}")
    if records := _digest_of_targets(file.with_name("losses.jsonl")):
        found.add(f"targets {count} {settings.get('model')} {records}")
    if file.with_name("losses.json").is_file():
        found.add(f"study {count} {_own_settings(task, settings)}")
    return frozenset(found)


def _digest_of_targets(file: Path) -> str | None:
    """Of the ids and the number of target tokens of all questions; None where none were kept."""
    try:
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        pairs = sorted((str(row["id"]), int(row["tokens"])) for row in rows)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return hashlib.sha256(json.dumps(pairs).encode()).hexdigest() if pairs else None


def _own_settings(task: str, settings: Mapping[str, Any]) -> str:
    """What a run's settings say of its own task."""
    from nalora import tasks
    from nalora.errors import NALoRAError
    from nalora.files import python_files

    try:
        # A report runs no code of a run's: the options of a task in a Python file stay unknown.
        options = {} if python_files.split(task) else tasks.option_types(task)
    except (NALoRAError, ImportError):
        options = {}
    names = ("task", "data_dir", "prompt_style", *options)
    return json_text({name: settings.get(name) for name in names}, sort_keys=True, default=str)


def _sets(evaluations: Sequence[Evaluation]) -> list[list[Evaluation]]:
    """Evaluations of the same questions together, in the order of the first of each."""
    sets: list[tuple[set[str], list[Evaluation]]] = []
    for each in evaluations:
        evidence, alike = set(each.evidence), [each]
        apart = []
        for other in sets:
            if other[0] & evidence:
                evidence |= other[0]
                alike = [*other[1], *alike]
            else:
                apart.append(other)
        sets = [*apart, (evidence, alike)]
    order = {id(each): place for place, each in enumerate(evaluations)}
    return sorted((alike for _, alike in sets), key=lambda alike: min(order[id(each)] for each in alike))


def _names(sets: Sequence[Sequence[Evaluation]]) -> list[str]:
    """The task's name; where it has several sets, with what tells each from the others."""
    result = []
    for alike in sets:
        mine = alike[0]
        others = [other[0] for other in sets if other[0].name == mine.name and other is not alike]
        told = _told_apart(mine, others) if others else ""
        result.append(f"{mine.name} ({told})" if told else mine.name)
    for place, name in enumerate(result):
        if result.count(name) > 1:
            result[place] = f"{name} [{sets[place][0].folder}]"
    return result


def _told_apart(mine: Evaluation, others: Sequence[Evaluation]) -> str:
    """What differs from the other sets, in words."""
    described = _described(mine)
    rest = [_described(other) for other in others]
    different = [text for field, text in described.items() if any(other.get(field) != text for other in rest)]
    if any(_described(other) == described for other in others) or not different:
        digest = mine.evaluated.get("questions")
        different.append(f"questions {str(digest)[:6]}" if digest else _NOT_RECORDED)
    return ", ".join(different)


def _described(each: Evaluation) -> dict[str, str]:
    examples, questions = each.summary.get("examples"), each.summary.get("questions")
    count = f"first {examples} of {questions} questions" if is_partial(each.summary) else f"{examples} questions"
    if not each.evaluated:
        return {"recorded": _NOT_RECORDED, "count": count}
    evaluated = each.evaluated
    options = evaluated.get("options")
    return {
        **({"data": f"data {evaluated['data']}"} if evaluated.get("data") else {}),
        **{
            f"option {name}": f"{name}={value}"
            for name, value in (options.items() if isinstance(options, dict) else ())
        },
        "style": f"{evaluated.get('style')} style",
        "tokens": f"at most {evaluated.get('max_new_tokens')} tokens",
        "count": count,
    }
