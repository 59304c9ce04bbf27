"""What is evaluated: a run with its adapter and the base model beside it, or a model by itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from nalora import tasks
from nalora.errors import NALoRAError, SettingsError, did_you_mean, shortened
from nalora.evaluation.evaluate import evaluate
from nalora.evaluation.identity import identity
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
from nalora.tasks.validation import hold_out


@dataclass(frozen=True)
class Request:
    """How a task is asked.

    Args:
        task: by name; a run's own by default.
        data_dir: the task's files; those of the run by default.
        options: settings of the task.
        style: ``plain`` or ``chat``; the run's by default.
        limit: only the first so many questions.
        batch_tokens: how much is written at a time.
        with_base: whether a run's base model is asked too.
        split: ``validation`` asks what the run held out of its training set, in place of the test set.
        writing: whether answers are written; else only the loss of the right ones is read.
        take_over: whether the folder is taken over from a process on another host that no longer runs.
        trust: whether code that a run's own settings name may run.
        own: the user's own settings of a run, as a study has them; code that they name may run without trust.
    """

    task: str | None = None
    data_dir: str | None = None
    options: dict[str, Any] | None = None
    style: str | None = None
    limit: int | None = None
    batch_tokens: int = 32_768
    with_base: bool = True
    split: Literal["test", "validation"] = "test"
    writing: bool = True
    take_over: bool = False
    trust: bool = False
    own: Mapping[str, Any] | None = None


def evaluate_target(
    target: str,
    request: Request,
    *,
    output: Path | None = None,
    device: str | None = None,
    report: Report | None = None,
) -> dict[str, dict[str, Any]]:
    """Summaries by who was asked, each with its folder: ``base`` and ``adapted`` for a run, ``model`` for a model.

    Raises:
        NALoRAError: no such run or model, an unfinished run, no such task, or options under which a run would be asked
            what it may have learnt from.
    """
    report = report or (lambda what, done, total: None)
    folder = RunFolder(target)
    if folder.settings.is_file():
        finished = finished_run(folder.path, trust=request.trust, own=request.own)
        refuse_unwritable(output or folder.path)
        return dict(_evaluate_run(finished, request, output, device, report))
    if request.task is None:
        raise _nothing_to_ask(folder)
    options = without_removed(request.options or {})
    _refuse_unknown_options(request.task, options)
    if output is None:
        place = Path("runs") / "evaluations" / folder_name(target.strip("/")) / tasks.name_of(request.task)
    else:
        place = output / tasks.name_of(request.task) / "model"
    refuse_unwritable(place)
    task = tasks.get(request.task, data_dir=request.data_dir, **_with_record(request.task, options, place))
    settings = RunSettings(target, request.task, device=device)
    loaded = task.prepare_model(loading.load(settings.model_spec(kind_of(task, settings))))
    style = request.style or "plain"
    asked = _Asked(task, task.test_examples(), style, options, request.data_dir)
    return {"model": _evaluate(loaded, asked, place, request, report)}


def _nothing_to_ask(folder: RunFolder) -> NALoRAError:
    """What is wrong with an argument that is no run, and has no task: a mistyped folder, or a model by itself."""
    path = folder.path
    if (len(path.parts) == 1 and not path.is_dir()) or (path / "config.json").is_file():
        return NALoRAError(str(path), found="a model without a task", expected="--task NAME", fix="see `nalora tasks`")
    runs = [each.parent.name for each in path.parent.glob("*/run.yaml")]
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
    own = request.task is None or tasks.resolve(request.task) == tasks.resolve(settings.task)
    name = request.task or settings.task
    given = {**(run.task_options if own else {}), **(request.options or {})}
    _refuse_unknown_options(name, given)
    options = without_removed(given)
    place = (output or finished.folder.evaluations) / tasks.name_of(name)
    data_dir = request.data_dir or (settings.data_dir if own else None)
    task = tasks.get(name, data_dir=data_dir, **_with_record(name, options, place))
    if own and (request.options or request.data_dir):
        task.refuse_what_was_learnt(tasks.get(name, data_dir=settings.data_dir, **run.task_options))
    spec = settings.model_spec(kind_of(task, settings))
    style = request.style or settings.prompt_style
    if request.split == "validation":
        place = place.parent / f"{place.name}{HELD_OUT}"
        examples: Sequence[Example] = hold_out(task.training_set(), settings.validation_size)[1]
    else:
        examples = task.test_examples()
    as_trained = own and options == run.task_options and style == settings.prompt_style
    asked = _Asked(task, examples, style, options, data_dir, as_trained and data_dir == settings.data_dir)
    base = task.prepare_model(loading.load(spec))
    if request.with_base:
        yield "base", _evaluate(base, asked, place / "base", request, report)
    adapted = _adapted(base, spec, trained, task)
    yield "adapted", _evaluate(adapted, asked, place / "adapted", request, report, trained)


def _refuse_unknown_options(name: str, options: Mapping[str, Any]) -> None:
    """What the command line says of a task, before anything is loaded."""
    problems: list[str] = []
    known = tasks.option_types(name)
    for option, value in options.items():
        if option in known:
            if value is Removed:
                continue
            converted(option, value, known[option], problems)
        else:
            near = did_you_mean(option, known, f"it has {', '.join(known) or 'none'}")
            problems.append(f"{shortened(option)}: no such option of {name} ({near})")
    if problems:
        raise SettingsError("--option", problems)


def _with_record(name: str, options: dict[str, Any], place: Path) -> dict[str, Any]:
    """The options, with a place to keep what a judge said where the task has one and none was given."""
    if "judgements" in tasks.option_types(name) and not options.get("judgements"):
        return {**options, "judgements": str(place / "judgements.jsonl")}
    return options


def _adapted(base: Loaded, spec: ModelSpec, trained: Path, task: Task) -> Loaded:
    if (trained / "adapter_config.json").is_file():
        import peft

        try:
            model = peft.PeftModel.from_pretrained(base.model, str(trained)).eval()
        except Exception as error:  # of a damaged file PEFT, safetensors and torch each raise their own
            raise NALoRAError(
                str(trained),
                found=f"an adapter that PEFT cannot load ({first_sentence(error)})",
                expected="the adapter that the run saved, on the base model it was trained on",
                fix="train the run again",
            ) from error
        return Loaded(model, base.processor, spec)
    return task.prepare_model(loading.load(replace(spec, name=str(trained)), processor=base.processor))


class _Asked(NamedTuple):
    """What is asked, and how; `own` as in `what_was_evaluated`."""

    task: Task
    examples: Sequence[Example]
    style: str
    options: dict[str, Any]
    data_dir: str | None
    own: bool | None = None


def _evaluate(
    loaded: Loaded, asked: _Asked, place: Path, request: Request, report: Report, trained: Path | None = None
) -> dict[str, Any]:
    """Ask, in a folder whose name says which weights and which questions: others are never mixed in."""
    who = place.name
    # All questions are named also where few are asked, so that a whole evaluation goes on from a quick look.
    key = identity(loaded, asked.task, asked.examples, style=asked.style, options=asked.options, trained=trained)
    folder = place.with_name(f"{place.name}-{key}")
    summary = evaluate(
        loaded,
        asked.task,
        folder,
        style=asked.style,
        examples=asked.examples,
        limit=request.limit,
        writing=request.writing,
        options=asked.options,
        data_dir=asked.data_dir,
        own=asked.own,
        take_over=request.take_over,
        batch_tokens=request.batch_tokens,
        report=lambda what, done, total: report(f"{who}: {what}", done, total),
    )
    return {**summary, "folder": str(folder)}
