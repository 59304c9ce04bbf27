"""Evaluate a target: a run, as its adapter and its base model, or a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from nalora import tasks
from nalora.errors import NALoRAError, SettingsError, did_you_mean, shortened
from nalora.evaluation.evaluate import Request, evaluate
from nalora.evaluation.identity import Questions, identity
from nalora.models import loading
from nalora.models.loading import Loaded, ModelSpec
from nalora.models.target_modules import first_sentence
from nalora.runs.folder import HELD_OUT, RunFolder
from nalora.runs.inputs import kind_of
from nalora.runs.progress import Report
from nalora.runs.saved_run import FinishedRun, finished_run, refuse_unless_own
from nalora.runs.settings import Removed, RunSettings, without_removed
from nalora.runs.values import converted
from nalora.runs.writable import folder_name, refuse_unwritable
from nalora.tasks import Example, Task
from nalora.tasks.splits import hold_out

__all__ = ["Request", "evaluate_target"]


def evaluate_target(
    target: str,
    request: Request,
    *,
    output: Path | None = None,
    device: str | None = None,
    report: Report = lambda *progress: None,
) -> dict[str, dict[str, Any]]:
    """Return summaries with their folders: under ``base`` and ``adapted`` for a run, under ``model`` for a model.

    Raises:
        NALoRAError: no such run, model or task, an unfinished run, or test questions on which the run was trained.
    """
    folder = RunFolder(target)
    if folder.settings.is_file():
        finished = finished_run(folder.path, trust=request.trust, own=request.own)
        refuse_unwritable(output or folder.path)
        return dict(_evaluate_run(finished, request, output, device, report))
    if request.task is None:
        raise _no_task(folder)
    options = _checked_options(request.task, without_removed(request.options or {}))
    name = tasks.name_of(request.task)
    models = Path("runs") / "evaluations" / folder_name(target.strip("/"))
    place = models / name if output is None else output / name / "model"
    refuse_unwritable(place)
    task = _task(request.task, request.data_dir, options, place)
    settings = RunSettings(target, request.task, device=device)
    loaded = task.prepare_model(loading.load(settings.model_spec(kind_of(task, settings))))
    questions = Questions(
        task,
        task.test_examples(),
        request.style or ("auto" if tasks.is_own_data(request.task) else "plain"),
        options,
        request.data_dir,
    )
    return {"model": _evaluate(loaded, questions, place, request, report)}


def _no_task(folder: RunFolder) -> NALoRAError:
    """Return the error for a target that is no run and has no task: a mistyped folder, or a model."""
    path = folder.path
    if (len(path.parts) == 1 and not path.is_dir()) or (path / "config.json").is_file():
        return NALoRAError(str(path), found="a model without a task", expected="--task NAME", fix="see `nalora tasks`")
    runs = [file.parent.name for file in path.parent.glob("*/run.yaml")]
    return NALoRAError(
        str(path),
        found="no run in that folder" if path.is_dir() else "no run there: no such folder",
        expected="a folder that `nalora train` wrote, or a model with --task NAME",
        fix=did_you_mean(path.name, runs, "check the path; for a model add --task (see `nalora tasks`)"),
    )


def _evaluate_run(
    finished: FinishedRun, request: Request, output: Path | None, device: str | None, report: Report
) -> Iterator[tuple[str, dict[str, Any]]]:
    run, trained = finished.run, finished.trained
    if output is None:
        refuse_unless_own(finished.folder, finished.folder.evaluations.name)
    settings = run.settings if device is None else replace(run.settings, device=device)
    own = request.task is None or tasks.identity(request.task, {}) == tasks.identity(settings.task, {})
    name = request.task or settings.task
    options = _checked_options(name, {**(run.task_options if own else {}), **(request.options or {})})
    place = (output or finished.folder.evaluations) / tasks.name_of(name)
    data_dir = request.data_dir or (settings.data_dir if own else None)
    task = _task(name, data_dir, options, place)
    if own and (request.options or request.data_dir):
        task.refuse_training_examples(tasks.get(name, data_dir=settings.data_dir, **run.task_options))
    spec = settings.model_spec(kind_of(task, settings))
    style = request.style or settings.prompt_style
    if request.split == "validation":
        place = place.parent / f"{place.name}{HELD_OUT}"
        examples: Sequence[Example] = hold_out(task.training_set(), settings.validation_size)[1]
    else:
        examples = task.test_examples()
    as_trained = own and (options, style, data_dir) == (run.task_options, settings.prompt_style, settings.data_dir)
    questions = Questions(task, examples, style, options, data_dir, as_trained)
    base = task.prepare_model(loading.load(spec))
    if request.with_base:
        yield "base", _evaluate(base, questions, place / "base", request, report)
    adapted = _adapted(base, spec, trained, task)
    yield "adapted", _evaluate(adapted, questions, place / "adapted", request, report, trained)


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


def _task(name: str, data_dir: str | None, options: dict[str, Any], place: Path) -> Task:
    """Return the task; a judge's answers are kept in the evaluation's folder unless an option names another file."""
    if "judgements" in tasks.option_types(name) and not options.get("judgements"):
        options = {**options, "judgements": str(place / "judgements.jsonl")}
    return tasks.get(name, data_dir=data_dir, **options)


def _adapted(base: Loaded, spec: ModelSpec, trained: Path, task: Task) -> Loaded:
    if not (trained / "adapter_config.json").is_file():
        return task.prepare_model(loading.load(replace(spec, name=str(trained)), processor=base.processor))
    import peft

    try:
        model = peft.PeftModel.from_pretrained(base.model, str(trained)).eval()
    except Exception as error:  # PEFT, safetensors and torch each raise their own types for a damaged file
        raise NALoRAError(
            str(trained),
            found=f"an adapter that PEFT cannot load ({first_sentence(error)})",
            expected="the adapter that the run saved, on the base model it was trained on",
            fix="train the run again",
        ) from error
    return Loaded(model, base.processor, spec)


def _evaluate(
    loaded: Loaded, questions: Questions, place: Path, request: Request, report: Report, trained: Path | None = None
) -> dict[str, Any]:
    # The key covers all questions even if only some are evaluated, so that a later evaluation of all reuses them.
    folder = place.with_name(f"{place.name}-{identity(loaded, questions, trained)}")

    def reported(what: str, done: int, total: int) -> None:
        report(f"{place.name}: {what}", done, total)

    return {**evaluate(loaded, questions, folder, request, reported), "folder": str(folder)}
