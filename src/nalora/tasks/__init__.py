"""Tasks by name: real data, and scoring that can be trusted."""

from __future__ import annotations

import inspect
import typing
from importlib import import_module
from pathlib import Path
from typing import Any

from nalora.errors import NALoRAError, did_you_mean
from nalora.tasks.task import Example, Scores, Task

__all__ = ["Example", "Scores", "Task", "described", "get", "names", "option_types", "options"]

# The module that knows a task; loaded when the task is asked for, since many bring packages of their own.
_MODULES = {
    "gsm8k": "math",
    "humaneval": "code",
    "mbpp": "code",
    "mt-bench": "chat",
    **dict.fromkeys(("mnli", "sst2", "cola", "qnli", "mrpc"), "glue"),
    **dict.fromkeys(("cars", "dtd", "eurosat", "gtsrb", "resisc45", "sun397", "svhn"), "images"),
    "digits": "images",
}
_GYM = "gym/"


def names() -> list[str]:
    """Every task by name; ``gym/FAMILY`` stands for all families of reasoning-gym."""
    return [*_MODULES, f"{_GYM}FAMILY"]


def get(name: str, *, data_dir: str | Path | None = None, **options: Any) -> Task:
    """The task of that name.

    Args:
        name: one of `names()`.
        data_dir: a folder with the data set's files, in place of the hub.
        options: settings of the task itself, such as the training set.

    Raises:
        NALoRAError: no such task, an option it does not have, or data that is not there.
    """
    make = import_module(module_of(name)).make
    try:
        task: Task = make(name, data_dir=data_dir, **options)
    except TypeError as error:
        if "unexpected keyword" not in str(error):
            raise
        raise NALoRAError(
            f"task {name!r}",
            found=str(error).partition(") ")[2] or str(error),
            expected="options that the task has",
            fix="see `nalora tasks` and the comments of the recipes",
        ) from error
    return task


def module_of(name: str) -> str:
    """The module whose `make` gives the task.

    Raises:
        NALoRAError: no such task.
    """
    if name.startswith(_GYM):
        return "nalora.tasks.gym"
    if name not in _MODULES:
        from nalora.tasks.gym import families

        raise NALoRAError(
            f"task {name!r}",
            found="no task of that name",
            expected=f"one of {', '.join(names())}",
            fix=did_you_mean(name, [*_MODULES, *(f"{_GYM}{each}" for each in families())], "see `nalora tasks`"),
        )
    return f"nalora.tasks.{_MODULES[name]}"


def options(name: str) -> list[str]:
    """The settings that the task has of its own.

    Raises:
        NALoRAError: no such task, or no such family of reasoning-gym where that is installed.
    """
    return list(option_types(name))


def option_types(name: str) -> dict[str, Any]:
    """The same with the type of each.

    Raises:
        NALoRAError: no such task, or no such family of reasoning-gym where that is installed.
    """
    module = import_module(module_of(name))
    if name.startswith(_GYM):
        module.refuse_unknown_family(name)
    made_by = getattr(module, "TASK", module.make)
    hints = typing.get_type_hints(made_by.__init__ if inspect.isclass(made_by) else made_by)
    taken = inspect.signature(made_by).parameters
    return {option: hints.get(option, Any) for option in taken if option not in ("name", "data_dir")}


def described() -> list[tuple[str, str, str]]:
    """(name, what it is, measures) of every task, without loading its data."""
    return [(name, *_DESCRIPTIONS[name if name in _DESCRIPTIONS else _MODULES.get(name, "gym")]) for name in names()]


_DESCRIPTIONS = {
    "gsm8k": ("grade-school math; learns MetaMathQA or GSM8K's own training set", "accuracy, accuracy_published"),
    "humaneval": ("164 Python functions; learns CodeFeedback", "pass_at_1"),
    "mbpp": ("500 short Python programs; learns CodeFeedback or MBPP's own", "pass_at_1"),
    "mt-bench": ("80 conversations of two turns, judged by a model; learns WizardLM", "rating, 1 to 10"),
    "glue": ("a GLUE task as text to text", "accuracy; mcc for CoLA, f1 for MRPC"),
    "images": ("classes of pictures for a CLIP", "accuracy"),
    "digits": ("scikit-learn's digits for a CLIP; no network", "accuracy"),
    "gym": ("any family of reasoning-gym, with its own scorer; no network", "accuracy, score"),
}
