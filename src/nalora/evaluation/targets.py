"""Evaluate a target: a run or an adapter, as its adapter and its base model, or a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nalora import tasks
from nalora.errors import NALoRAError, SettingsError, did_you_mean, shortened
from nalora.evaluation.evaluate import Request, evaluate
from nalora.evaluation.identity import Questions, identity
from nalora.models.adapters import is_adapter
from nalora.models.loading import Loaded
from nalora.runs import targets
from nalora.runs.conversion import Removed, converted, without_removed
from nalora.runs.folder import HELD_OUT, RunFolder
from nalora.runs.inputs import kind_of
from nalora.runs.progress import Report
from nalora.runs.saved_run import FinishedRun, refuse_unless_own
from nalora.runs.targets import Target
from nalora.runs.writable import refuse_unwritable
from nalora.tasks import Example, Task
from nalora.tasks.own_data import OwnData

__all__ = ["Request", "evaluate_parts", "evaluate_target"]


def evaluate_target(
    name: str,
    request: Request,
    *,
    output: Path | None = None,
    device: str | None = None,
    report: Report = lambda *progress: None,
    notify: Callable[[str], None] = lambda line: None,
) -> dict[str, dict[str, Any]]:
    """Return summaries with their folders: ``base`` and ``adapted`` of a run or an adapter, ``model`` of a model.

    `notify` gets a line with the number of rows of own data that are evaluated.

    Raises:
        NALoRAError: no such run, adapter, model or task, an unfinished run, or test questions on which the run was
            trained.
    """
    if request.task is None and not RunFolder(name).settings.is_file():
        raise _no_task(Path(name))
    target = targets.resolve(name, model=request.model, device=device, trust=request.trust, own=request.own)
    refuse_unwritable(output or (target.run.folder.path if target.run else targets.results_of(name)))
    if target.run:
        questions, place = _questions_of_run(target.run, request, output)
    else:
        questions, place = _questions(target, request, output)
    task = questions.task
    if isinstance(task, OwnData) and request.split == "test":
        notify(task.evaluated(request.limit))
    models = _load(target, task, with_base=request.with_base)
    if target.trained is None:
        return {"model": _evaluate(models.trained, questions, place, request, report)}
    summaries = {}
    if models.base:
        summaries["base"] = _evaluate(models.base, questions, place / "base", request, report)
    trained = _evaluate(models.trained, questions, place / "adapted", request, report, target.trained)
    return {**summaries, "adapted": trained}


def evaluate_parts(name: str, requests: Sequence[Request], *, device: str | None = None) -> None:
    """Evaluate the trained model of a run on several parts of its own task, such as held-out and test examples.

    The model is loaded once. Every part is stored like that of `evaluate_target`.

    Args:
        name: the run's folder.
        requests: without task, options and base model; alike in `own` and `trust`.
        device: where the model is computed.

    Raises:
        NALoRAError: as `evaluate_target`.
    """
    target = targets.resolve(name, device=device, trust=requests[0].trust, own=requests[0].own)
    assert target.run is not None
    refuse_unwritable(target.run.folder.path)
    parts = [_questions_of_run(target.run, request, None) for request in requests]
    models = _load(target, parts[0][0].task)
    for request, (questions, place) in zip(requests, parts, strict=True):
        _evaluate(models.trained, questions, place / "adapted", request, trained=target.trained)


def _load(target: Target, task: Task, *, with_base: bool = False) -> targets.Models:
    return targets.load(target, kind=kind_of(task, target.spec), with_base=with_base, prepare=task.prepare_model)


def _no_task(path: Path) -> NALoRAError:
    """Return the error for a target that is no run and has no task: a mistyped folder, an adapter, or a model."""
    if is_adapter(path) or (len(path.parts) == 1 and not path.is_dir()) or (path / "config.json").is_file():
        found = f"{'an adapter' if is_adapter(path) else 'a model'} without a task"
        return NALoRAError(
            str(path), found=found, expected="--task NAME or --task FILE.jsonl", fix="see `nalora tasks`"
        )
    runs = [file.parent.name for file in path.parent.glob("*/run.yaml")]
    return NALoRAError(
        str(path),
        found="no run in that folder" if path.is_dir() else "no run there: no such folder",
        expected="a folder that `nalora train` wrote, or an adapter or a model with --task NAME or FILE.jsonl",
        fix=did_you_mean(path.name, runs, "check the path; for a model add --task (see `nalora tasks`)"),
    )


def _questions(target: Target, request: Request, output: Path | None) -> tuple[Questions, Path]:
    """Return the questions for an adapter or a model, and the folder of the results."""
    assert request.task is not None
    options = _checked_options(request.task, without_removed(request.options or {}))
    name = tasks.name_of(request.task)
    if output is None:
        place = targets.results_of(target.name) / name
    else:
        place = output / name if target.trained else output / name / "model"
    refuse_unwritable(place)
    every_row = not _trained_on(request.task, target.trained or Path(target.name))
    task = _task(request.task, request.data_dir, options, place, every_row=every_row)
    style = request.style or ("auto" if tasks.is_own_data(request.task) else "plain")
    return Questions(task, task.test_examples(), style, options, request.data_dir), place


def _questions_of_run(finished: FinishedRun, request: Request, output: Path | None) -> tuple[Questions, Path]:
    """Return the questions for a run, by default those of its own task, and the folder of the results."""
    run, settings = finished.run, finished.run.settings
    if output is None:
        refuse_unless_own(finished.folder, finished.folder.evaluations.name)
    own = request.task is None or tasks.identity(request.task, {}) == tasks.identity(settings.task, {})
    name = request.task or settings.task
    options = _checked_options(name, {**(run.task_options if own else {}), **(request.options or {})})
    place = (output or finished.folder.evaluations) / tasks.name_of(name)
    data_dir = request.data_dir or (settings.data_dir if own else None)
    every_row = not own and not _trained_on(name, finished.trained)
    task = _task(name, data_dir, options, place, every_row=every_row)
    if own and (request.options or request.data_dir):
        task.refuse_training_examples(tasks.get(name, data_dir=settings.data_dir, **run.task_options))
    style = request.style or settings.prompt_style
    if request.split == "validation":
        place = place.parent / f"{place.name}{HELD_OUT}"
        examples: Sequence[Example] = task.validation_split(settings.validation_size)[1]
    else:
        examples = task.test_examples()
    as_trained = own and (options, style, data_dir) == (run.task_options, settings.prompt_style, settings.data_dir)
    return Questions(task, examples, style, options, data_dir, as_trained), place


def _checked_options(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options without removed ones; raise a SettingsError for unknown options and wrong types."""
    problems: list[str] = []
    known = tasks.option_types(name)
    for option, value in options.items():
        if option not in known:
            near = did_you_mean(option, known, f"it has {', '.join(known) or 'none'}")
            problems.append(f"{shortened(option)}: no such option of {name} ({near})")
        elif value is not Removed:
            converted(option, value, known[option], problems)
    if problems:
        raise SettingsError("--option", problems)
    return without_removed(options)


def _trained_on(name: str, trained: Path) -> bool:
    """Return whether the adapter or the model in a run's folder was trained on this data, whatever its name is now."""
    folders = trained.absolute().parents[:2] if tasks.is_own_data(name) else ()
    records = [RunFolder(folder).data_record() for folder in folders]
    content = {*tasks.contents(name, {})["task"].values()} if any(records) else set()
    return any(not content.isdisjoint(record.get("task", {}).values()) for record in records)


def _task(name: str, data_dir: str | None, options: dict[str, Any], place: Path, *, every_row: bool) -> Task:
    """Return the task; a judge's answers are kept in the evaluation's folder unless an option names another file."""
    if "judgements" in tasks.option_types(name) and not options.get("judgements"):
        options = {**options, "judgements": str(place / "judgements.jsonl")}
    return tasks.get(name, data_dir=data_dir, every_row=every_row, **options)


def _evaluate(
    loaded: Loaded,
    questions: Questions,
    place: Path,
    request: Request,
    report: Report = lambda *progress: None,
    trained: Path | None = None,
) -> dict[str, Any]:
    # The key covers all questions even if only some are evaluated, so that a later evaluation of all reuses them.
    folder = place.with_name(f"{place.name}-{identity(loaded, questions, trained)}")

    def reported(what: str, done: int, total: int) -> None:
        report(f"{place.name}: {what}", done, total)

    return {**evaluate(loaded, questions, folder, request, reported), "folder": str(folder)}
