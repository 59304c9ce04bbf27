"""The settings of a run: one flat YAML file, checked as a whole before anything is loaded."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import shlex
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from nalora import methods, tasks
from nalora.errors import NALoRAError, SettingsError, collecting, did_you_mean, shortened
from nalora.files import python_files, yaml_reader
from nalora.methods.method import Method
from nalora.models.loading import Kind, ModelSpec
from nalora.runs import old_names, packaged
from nalora.runs.conversion import Removed, converted, key_values, takes_mapping, without_removed
from nalora.runs.values import limit_problems
from nalora.tasks import data_files

# A null judge is allowed: the run can be trained now, and evaluated where there is a judge.
_JUDGE = "judge_model"
_OWN_DATA = "my-data"  # the recipe for data of one's own


@dataclass(frozen=True)
class RunSettings:
    """The settings that every run has, whatever its method and task. recipes/laptop.yaml explains each of them."""

    model: str
    task: str
    method: str = "lora"
    output: str | None = None
    data_dir: str | None = None
    seed: int = 0
    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    target_modules: str | list[str] = "all-linear"
    target_parameters: list[str] | None = None
    learning_rate: float = 1e-4
    learning_rate_factors: dict[str, float] | None = None
    epochs: float = 1.0
    steps: int | None = None
    stop_after: int | None = None
    batch_size: int = 32
    micro_batch_size: int | None = None
    schedule: Literal["cosine", "linear", "constant", "constant_with_warmup", "range_test"] = "cosine"
    warmup: float = 0.03
    weight_decay: float = 0.0
    max_norm: float = 1.0
    optimizer: str = "adamw_torch"
    max_length: int = 1024
    overlong: Literal["drop", "truncate"] = "drop"
    packing: bool = False
    batches: Literal["random", "like-length"] = "random"
    prompt_style: Literal["auto", "plain", "chat"] = "plain"
    train_limit: int | None = None
    validation_size: int = 0
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    device: str | None = None
    attention: str | None = None
    quantise: Literal["4bit", "8bit"] | None = None
    evaluate_quantised: bool = True
    revision: str | None = None
    trust_remote_code: bool = False
    gradient_checkpointing: bool = False
    cuda_graphs: bool = False
    fused_adapters: bool | None = None
    base: Literal["fp8"] | None = None
    liger: bool = False
    log_every: int = 10
    save_every: int = 0
    save_minutes: float = 5.0
    snapshot_every: int = 0
    gate_movement_steps: list[int] | None = None
    report_to: str | list[str] = "none"

    def model_spec(self, kind: Kind = "causal") -> ModelSpec:
        """Return the specification of the base model."""
        names = ("dtype", "device", "attention", "quantise", "revision", "trust_remote_code")
        return ModelSpec(self.model, kind, **{name: getattr(self, name) for name in names})


@dataclass(frozen=True)
class Run:
    """The checked settings of a run."""

    settings: RunSettings
    method: Method
    task_options: dict[str, Any] = field(default_factory=dict)
    deleted: dict[str, Any] = field(default_factory=dict)  # settings of an earlier version that are part of the key
    notices: tuple[str, ...] = field(default=(), compare=False)  # sentences for whoever typed the command

    def to_dict(self) -> dict[str, Any]:
        """Return all settings with their values, flat as in the file."""
        return dataclasses.asdict(self.settings) | self.method.settings() | self.task_options

    def refuse_unready(self) -> None:
        """Raise NALoRAError if the evaluation would need a judge and none is named, before anything is loaded."""
        name = self.settings.task
        left_open = _JUDGE in self.task_options and self.task_options[_JUDGE] is None
        if tasks.is_own_data(name) and "judge" not in (self.task_options.get("measure") or ()):
            return  # no judge, and its files may be large
        if _JUDGE in tasks.option_types(name) and not left_open:
            tasks.get(name, data_dir=self.settings.data_dir, **self.task_options).refuse_unready()


def read(file: str | Path, overrides: Sequence[str] = ()) -> Run:
    """Return the run that a YAML file (or a recipe's name) and ``key=value`` arguments describe.

    Raises:
        NALoRAError: no such file, not YAML, or wrong settings, all of which are named in one message.
    """
    recipes = packaged.recipes()
    path = packaged.find(file, recipes)
    _refuse_data(path)
    fix = did_you_mean(str(file), recipes, "check the path, or give a recipe's name: see `nalora recipes`")
    options = old_names.renamed(yaml_reader.read(path, "a run's YAML file", fix))
    if "arms" in options:
        raise NALoRAError(str(path), found="a study", expected="a run's YAML file", fix=f"nalora study {path}")
    changes = old_names.renamed(key_values(overrides))
    known = {**options, **_types()}
    for key in (key for key, value in changes.items() if value is Removed and key not in known):
        near = did_you_mean(key, known, "leave it out")
        raise NALoRAError(f"{shortened(key)}=", found=f"no such setting in {path}", expected="one to remove", fix=near)
    notices: tuple[str, ...] = ()
    if changes.get("task", options.get("task")) != options.get("task"):
        kept = _without_task_settings(options)
        unused = [f"{key}: {shortened(options[key])}" for key in options if key not in {*kept, *changes}]
        notices = (f"settings of the recipe's task not used: {', '.join(unused)}",) if unused else ()
        options = kept
    elif isinstance(options.get("task"), str):
        options["task"] = packaged.data_file(options["task"], path)
    options = without_removed({**options, **changes})
    if options.get("output") is None:
        options["output"] = str(Path("runs") / path.stem)
    return replace(_checked(options, changes, str(path)), notices=notices)


def _refuse_data(path: Path) -> None:
    """Raise NALoRAError for a data file in place of a run's file; a .json file may be either."""
    name, is_hub = str(path), str(path).startswith(data_files.HUB)
    if not (is_hub or name.lower().endswith(data_files.SUFFIXES)) or path.suffix.lower() == ".json":
        return
    command = shlex.join(["nalora", "train", _OWN_DATA, f"task={name}"])
    found, fix = "data", f"run `{command}`, or suggest in place of train"
    if not is_hub and not packaged.is_file(path):
        found, fix = "no such file", f"check the path; for data run `{command}`"
    raise NALoRAError(name, found=found, expected="a run's YAML file, or the name of a recipe", fix=fix)


def _checked(options: Mapping[Any, Any], changes: Mapping[str, Any], where: str) -> Run:
    """Return `check` of the settings; if all problems are of the command line's settings, the error says so."""
    try:
        return check(options, where)
    except SettingsError as error:
        typed = [problem for problem in error.problems if re.split(r"\W", problem, maxsplit=1)[0] in changes]
        if len(typed) < len(error.problems):
            raise
        raise SettingsError("on the command line", typed) from error


def _without_task_settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a file except those of its task, for a command line that names another task."""
    of_task: set[str] = set()
    with contextlib.suppress(NALoRAError):
        of_task = {*tasks.option_types(str(options.get("task")))} - {*_types()}
    return {key: value for key, value in options.items() if key not in of_task}


def check(options: Mapping[Any, Any], where: str = "run") -> Run:
    """Return the run with these settings.

    Raises:
        NALoRAError: all problems in one message.
    """
    problems = [
        f"{shortened(repr(key))}: expected the name of a setting" for key in options if not isinstance(key, str)
    ]
    problems += old_names.problems(options)
    deleted = old_names.in_key(options)
    options = {key: value for key, value in old_names.current(options).items() if isinstance(key, str)}
    run_types = _types()
    method: type[Method] | None = None
    task_types: dict[str, Any] = {}
    method_types: dict[str, Any] = {}
    with collecting(problems):
        method = methods.get(str(options.get("method", "lora")))
    with collecting(problems):
        task_types = tasks.option_types(str(options["task"])) if "task" in options else {}
    with collecting(problems):
        method_types = method.options(options) if method else {}
    # Otherwise an unknown setting may belong to the intended method or task: only a near miss of a known one is named.
    all_known = not problems and "task" in options
    types = {**task_types, **method_types, **run_types}
    values: dict[str, Any] = {}
    for key, value in options.items():
        if key in types:
            result = converted(key, value, types[key], problems)
            # A task's option stays as written: the keys of stored runs are made from it.
            values[key] = result if key in run_types or key in method_types else value
        elif all_known and method and (owners := _methods_with(key)):
            problems.append(f"{key}: a setting of {', '.join(owners)}; the method of this run is {method.name}")
        else:
            # A misspelt setting whose value is a mapping can only be one that takes a mapping.
            near = [name for name, hint in types.items() if isinstance(value, Mapping) == takes_mapping(hint)]
            fix = did_you_mean(key, near, "", cutoff=0.6 if all_known else 0.9)
            if fix or all_known:
                problems.append(f"{shortened(key)}: no such setting" + (f" ({fix})" if fix else ""))
    problems += [f"{name}: missing (see `nalora {name}s`)" for name in ("model", "task") if name not in options]
    problems += limit_problems(values)
    prepared = None
    if method and not problems:
        with collecting(problems):
            prepared = method.build(**_only(values, method_types))
    if problems or prepared is None:
        raise SettingsError(where, problems)
    # Tasks that come with nalora have the prompts of published evaluations; own data takes the model's chat template.
    own_data = tasks.is_own_data(values["task"])
    if own_data or values.get("prompt_style") == "auto":
        values["prompt_style"] = values.get("prompt_style", "auto") if own_data else "plain"
    run_settings = RunSettings(**_only(values, run_types))
    return Run(run_settings, prepared, _only(values, task_types), deleted)


def chosen(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run.yaml that differ from their defaults, or that have none.

    No code that the settings name is run: of a method in a Python file all settings are returned.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(RunSettings) if field.name != "method"}
    hosted = {"on": settings["on"]} if "on" in settings else {}
    names = [str(name) for name in (settings.get("method", "lora"), *hosted.values())]
    if not any(map(python_files.split, names)):
        with contextlib.suppress(NALoRAError, TypeError):  # a method or setting of another version
            defaults |= methods.get(names[0]).build(**hosted).defaults()
    return {key: value for key, value in settings.items() if key not in defaults or value != defaults[key]}


def types_of_all() -> dict[str, Any]:
    """Return the types of all settings by name: of every run, and of the methods and tasks that come with nalora."""
    types = tasks.types_of_all_options()
    for name in methods.names():
        types |= methods.get(name).options({})
    return types | _types()


def _only(values: Mapping[str, Any], names: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key in names}


@functools.cache
def _types() -> dict[str, Any]:
    """Return the type of every run setting; cached because a study checks hundreds of runs."""
    return typing.get_type_hints(RunSettings)


def _methods_with(setting: str) -> list[str]:
    """Return the methods that have this setting: the wrong method is a likelier mistake than a misspelt name."""
    return [name for name in methods.names() if setting in methods.get(name).options({})]
