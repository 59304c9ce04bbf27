"""Evaluations on the disk, of a run, an adapter or a model, next to the base model's answers to the same questions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from nalora.errors import NALoRAError, did_you_mean
from nalora.evaluation.answers import Answered, read_answers
from nalora.files import expanded
from nalora.files.atomic import read_json
from nalora.runs.folder import RunFolder
from nalora.runs.targets import results_of

_OUTPUTS = "outputs.jsonl"


@dataclass(frozen=True)
class StoredEvaluation:
    """The folders of one evaluation by model: ``adapted`` and perhaps ``base``, or ``model``."""

    task: str
    folders: dict[str, Path]
    modified: float

    def answers(self) -> dict[str, list[Answered]]:
        """Return the answers by model, the base model's first."""
        return {model: read_answers(folder) for model, folder in self.folders.items()}


def stored_evaluations(name: str) -> list[StoredEvaluation]:
    """Return the evaluations of a run, an adapter or a model, or in a folder, the newest last. No model is loaded.

    Raises:
        NALoRAError: nothing of that name, or no answers yet.
    """
    root = _root(name)
    folders = sorted(file.parent for file in root.rglob(_OUTPUTS)) if root.is_dir() else []
    by_task: dict[Path, list[Path]] = {}
    for folder in folders:
        by_task.setdefault(folder.parent, []).append(folder)
    evaluations = [evaluation for group in by_task.values() for evaluation in _of_task(group)]
    if not evaluations:
        raise _nothing(name, root)
    return sorted(evaluations, key=lambda evaluation: evaluation.modified)


def _root(name: str) -> Path:
    path = expanded(name)
    if (path / "run.yaml").is_file():
        return RunFolder(path).evaluations
    if path.is_dir() and any(path.rglob(_OUTPUTS)):
        return path
    return results_of(name)


def _of_task(folders: Iterable[Path]) -> list[StoredEvaluation]:
    """Return the evaluations in a task's folder; every base model's answers go with those of its adapter."""
    by_model: dict[str, list[Path]] = {}
    for folder in folders:
        model = folder.name.rpartition("-")[0]
        by_model.setdefault(model if model in ("base", "adapted") else "model", []).append(folder)
    bases = by_model.pop("base", [])
    evaluations = []
    for model, alike in by_model.items():
        for folder in alike:
            base = next((other for other in bases if model == "adapted" and _same_questions(other, folder)), None)
            named = {"base": base, model: folder} if base else {model: folder}
            evaluations.append(_evaluation(named, folder))
    return evaluations or [_evaluation({"base": folder}, folder) for folder in bases]


def _evaluation(folders: dict[str, Path], folder: Path) -> StoredEvaluation:
    summary = read_json(folder / "summary.json") or {}
    task = str(summary.get("task") or folder.parent.name)
    return StoredEvaluation(task, folders, (folder / _OUTPUTS).stat().st_mtime)


def _same_questions(one: Path, other: Path) -> bool:
    """Whether one of two folders has all questions of the other, with the same texts where both recorded them."""
    asked, also = ({answer.id: answer.question for answer in read_answers(folder)} for folder in (one, other))
    both = asked.keys() & also.keys()
    texts = ((asked[key], also[key]) for key in both)
    return len(both) == min(len(asked), len(also)) > 0 and all(a == b or None in (a, b) for a, b in texts)


def _nothing(name: str, root: Path) -> NALoRAError:
    path = expanded(name)
    if (path / "run.yaml").is_file():
        return NALoRAError(
            name, found="a run without answers", expected="an evaluation of it", fix=f"start `nalora evaluate {name}`"
        )
    if path.exists():
        return NALoRAError(
            name,
            found=f"no answers in it or in {root}",
            expected="a run, an adapter or a model that was evaluated, or the folder of an evaluation",
            fix=f"start `nalora evaluate {name} --task TASK`",
        )
    runs = [str(file.parent) for file in (*Path("runs").glob("*/run.yaml"), *path.parent.glob("*/run.yaml"))]
    return NALoRAError(
        name,
        found="no such folder, and no evaluation of a model of that name",
        expected="the folder of a run, of an adapter or of an evaluation, or a model that was evaluated",
        fix=did_you_mean(name, runs, "check the path; `nalora evaluate` makes an evaluation"),
    )
