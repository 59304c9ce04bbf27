"""What a run is told to do: one flat YAML file, checked as a whole before anything is loaded."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from nalora import methods, tasks
from nalora.errors import NALoRAError, SettingsError, collecting, did_you_mean, shortened
from nalora.files import yaml_reader
from nalora.methods.method import Adapter, Method
from nalora.models.loading import ModelSpec
from nalora.runs import old_names, packaged
from nalora.runs.conversion import converted, takes_pairs
from nalora.runs.limits import problems_of_values


@dataclass(frozen=True)
class RunSettings:
    """A run's own settings; those of its method and its task are given with them. recipes/laptop.yaml explains each."""

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
    learning_rate: float = 1e-4
    epochs: float = 1.0
    steps: int | None = None
    batch_size: int = 32
    micro_batch_size: int | None = None
    schedule: Literal["cosine", "linear", "constant", "constant_with_warmup"] = "cosine"
    warmup: float = 0.03
    weight_decay: float = 0.0
    max_norm: float = 1.0
    optimizer: str = "adamw_torch"
    max_length: int = 1024
    too_long: Literal["drop", "cut"] = "drop"
    packing: bool = False
    batches: Literal["random", "like-length"] = "random"
    prompt_style: Literal["plain", "chat"] = "plain"
    train_limit: int | None = None
    validation_size: int = 0
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    device: str | None = None
    attention: str | None = None
    quantise: Literal["4bit", "8bit"] | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    gradient_checkpointing: bool = False
    cuda_graphs: bool = False
    fused_adapters: bool = False
    liger: bool = False
    log_every: int = 10
    save_every: int = 0
    save_minutes: float = 5.0
    snapshot_every: int = 0
    report_to: str | list[str] = "none"

    def model_spec(self, kind: Any) -> ModelSpec:
        """The model that the run asks for."""
        names = ("dtype", "device", "attention", "quantise", "revision", "trust_remote_code")
        return ModelSpec(self.model, kind, **{name: getattr(self, name) for name in names})

    def adapter(self) -> Adapter:
        """The adapter that the run asks for."""
        return Adapter(self.rank, self.alpha, self.dropout, self.target_modules)


@dataclass(frozen=True)
class Run:
    """A run that can start: everything in the file was understood."""

    settings: RunSettings
    method: Method
    task_options: dict[str, Any] = field(default_factory=dict)
    deleted: dict[str, Any] = field(default_factory=dict)  # settings of an earlier version that its key is made of

    def to_dict(self) -> dict[str, Any]:
        """All settings with their values, flat as in the file."""
        return dataclasses.asdict(self.settings) | self.method.settings() | self.task_options


def read(file: str | Path, overrides: Sequence[str] = ()) -> Run:
    """The run that a YAML file, or a recipe of that name, and ``key=value`` arguments describe.

    Raises:
        NALoRAError: no such file, no YAML, or settings that are not right: all of them in one message.
    """
    path = packaged.recipe(file)
    given = yaml_reader.read(path, "a run's YAML file", _how_to_get_one(str(file)))
    if "arms" in given:
        raise NALoRAError(str(path), found="a study", expected="a run's YAML file", fix=f"nalora study {path}")
    changes = key_values(overrides)
    for key in (key for key, value in changes.items() if value is Removed and key not in {*given, *_types()}):
        near = did_you_mean(key, [*given, *_types()], "leave it out")
        raise NALoRAError(f"{shortened(key)}=", found=f"no such setting in {path}", expected="one to remove", fix=near)
    given = without_removed({**given, **changes})
    if given.get("output") is None:
        given["output"] = str(Path("runs") / path.stem)
    return check(given, where=str(path))


class Removed:
    """Stands for the value of a setting that is to be as if the file did not have it."""


def key_values(arguments: Sequence[str]) -> dict[str, Any]:
    """``key=value`` arguments of the command line, their values read as YAML; `Removed` for ``key=``.

    Raises:
        NALoRAError: an argument without =, a value that is no YAML, or a key that is given twice.
    """
    found: dict[str, Any] = {}
    for argument in arguments:
        key, separator, value = argument.partition("=")
        if not separator or not key:
            what = "no name before =" if separator else "no ="
            fix = f"write {shortened(argument or 'key')}=VALUE" if not separator else "write the setting's name first"
            raise NALoRAError(shortened(argument), found=what, expected="key=value", fix=fix)
        if key in found:
            raise NALoRAError(
                shortened(argument), found=f"{shortened(key)} given twice", expected="once", fix="keep one of them"
            )
        found[key] = yaml_reader.value(value, shortened(argument)) if value else Removed
    return found


def without_removed(given: Mapping[str, Any]) -> dict[str, Any]:
    """All settings but those that the command line removes with ``key=``."""
    return {key: value for key, value in given.items() if value is not Removed}


def _how_to_get_one(name: str) -> str:
    recipes = packaged.recipes()
    return did_you_mean(name, recipes, "check the path, or give a recipe's name: see `nalora recipes`")


def check(given: Mapping[Any, Any], where: str = "run") -> Run:
    """Understand settings.

    Raises:
        NALoRAError: every problem at once.
    """
    problems = [f"{shortened(repr(key))}: expected the name of a setting" for key in given if not isinstance(key, str)]
    deleted = old_names.in_key(given)
    given = {key: value for key, value in old_names.current(given).items() if isinstance(key, str)}
    own = _types()
    method: type[Method] | None = None
    of_task: dict[str, Any] = {}
    options: dict[str, Any] = {}
    with collecting(problems):
        method = methods.get(str(given.get("method", "lora")))
    with collecting(problems):
        of_task = tasks.option_types(str(given["task"])) if "task" in given else {}
    with collecting(problems):
        options = method.options(given) if method else {}
    # Else a strange setting may be one of the method or the task that was meant: only a slip in a known one is named.
    all_known = not problems and "task" in given
    known = {**own, **options, **of_task}
    values: dict[str, Any] = {}
    for key, value in given.items():
        if key in own or key in options:
            hint = own[key] if key in own else options[key]
            values[key] = converted(key, value, hint, problems)
        elif key in of_task:
            converted(key, value, of_task[key], problems)
            values[key] = value  # as it was written: the keys of stored runs are made from it
        elif all_known and method and (owners := _methods_with(key)):
            problems.append(f"{key}: a setting of {', '.join(owners)}; the method of this run is {method.name}")
        elif (near := did_you_mean(key, _fitting(known, value), "", cutoff=0.6 if all_known else 0.9)) or all_known:
            problems.append(f"{shortened(key)}: no such setting" + (f" ({near})" if near else ""))
    problems += [f"{name}: missing (see `nalora {name}s`)" for name in ("model", "task") if name not in given]
    problems += problems_of_values(values)
    prepared = None
    if method and not problems:
        with collecting(problems):
            prepared = method.build(**{key: value for key, value in values.items() if key in options})
    if problems or prepared is None:
        raise SettingsError(where, problems)
    settings = RunSettings(**{key: value for key, value in values.items() if key in own})
    return Run(settings, prepared, {key: value for key, value in values.items() if key in of_task}, deleted)


def _fitting(types: Mapping[str, Any], value: Any) -> list[str]:
    """The settings that a misspelt one with this value may have meant: `key: value` pairs fit no plain setting."""
    return [name for name, hint in types.items() if isinstance(value, Mapping) == takes_pairs(hint)]


@functools.cache
def _types() -> dict[str, Any]:
    """The settings that every run has, with their types. Kept: a study asks for each of its runs."""
    return typing.get_type_hints(RunSettings)


def _methods_with(setting: str) -> list[str]:
    """Methods that have this setting: of one without it, the wrong method is the likelier mistake."""
    return [name for name in methods.names() if setting in methods.get(name).options({})]
