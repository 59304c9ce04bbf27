"""Tasks by name, with one interface: entries of TASKS in this package's modules, or in a user's Python file."""

from __future__ import annotations

import contextlib
import functools
import inspect
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nalora.errors import NALoRAError, did_you_mean
from nalora.files import python_files
from nalora.tasks import data_files, gym
from nalora.tasks.own_data import OwnData
from nalora.tasks.task import Answer, Example, Scores, Task, TrainingInputs
from nalora.tasks.text_files import Report

__all__ = ["Answer", "Example", "Scores", "Task", "TrainingInputs", "get", "name_of", "names", "option_types"]


# Parameters of a task's class that `get` fills in and that are no settings.
_COMMON = ("name", "source", "data_dir", "every_row", "report")


@functools.cache
def _known() -> dict[str, type[Task]]:
    return python_files.scan(__name__, __path__, "TASKS")


def names() -> list[str]:
    """Return the names of all tasks; ``gym/FAMILY`` means any family of reasoning-gym, ``FILE`` any data."""
    return [*sorted(_known()), gym.Gym.name, OwnData.name]


def resolve(name: str) -> tuple[str, type[Task]]:
    """Return the task's own name and its class.

    Args:
        name: one of `names()`, ``gym/`` with a family, ``file.py`` for the first entry of a file's TASKS, or
            ``file.py:my-task``; or a data file, a folder of them or ``hub:owner/name`` (`own_data`).

    Raises:
        NALoRAError: no such task, or, if reasoning-gym is installed, no such family.
    """
    if python_files.split(name):
        task: type[Task] = python_files.entry("task", name, "TASKS")
        return task.name, task
    if name not in _known() and not name.startswith(gym.PREFIX) and data_files.is_data(name):
        return Path(name).name, OwnData
    if name.startswith(gym.PREFIX):
        gym.refuse_unknown_family(name)
        return name, gym.Gym
    if name not in _known():
        candidates = [*_known(), *(gym.PREFIX + family for family in gym.families())]
        raise NALoRAError(
            f"task {name!r}",
            found="no task of that name",
            expected=f"one of {', '.join(names())}, a data file, or a Python file with TASKS",
            fix=did_you_mean(name, candidates, "see `nalora tasks`"),
        )
    return name, _known()[name]


def get(
    name: str,
    *,
    data_dir: str | Path | None = None,
    every_row: bool = False,
    report: Report = lambda *progress: None,
    **options: Any,
) -> Task:
    """Return the task of that name.

    Args:
        name: as in `resolve`.
        data_dir: a folder with the data set's files, in place of the hub.
        every_row: of own data, take every row as a test row unless an option or the files say otherwise.
        report: gets (what is done, how much of it, of how much) while large files are read.
        options: settings of the task, such as the training set.

    Raises:
        NALoRAError: no such task or option, or missing data.
    """
    own_name, task = resolve(name)
    known = option_types(name)
    for option in options.keys() - known.keys():
        raise NALoRAError(
            f"task {name!r}",
            found=f"no option {option!r}",
            expected=f"options that the task has: {', '.join(known) or 'none'}",
            fix=did_you_mean(option, known, "leave it out"),
        )
    parameters = inspect.signature(task).parameters
    common: dict[str, Any] = {
        "name": own_name, "source": name, "data_dir": data_dir, "every_row": every_row, "report": report
    }  # fmt: skip
    common = {key: value for key, value in common.items() if key in parameters}
    made = task(**common, **options)
    made.name = own_name  # a subclass may have a parent that sets another
    return made


def name_of(name: str) -> str:
    """Return the name of a task in results, which for a Python file's task does not depend on the file's path."""
    return resolve(name)[0]


def is_own_data(name: str) -> bool:
    """Return whether the task is a data file, a folder of them or a data set of the hub."""
    with contextlib.suppress(NALoRAError):
        return resolve(name)[1] is OwnData
    return False


def identity(name: str, options: Mapping[str, Any]) -> Any:
    """Return what distinguishes a task from others: its name in results, and for own data the content of its files."""
    if not is_own_data(name):
        return name_of(name)
    return [name_of(name), contents(name, options)]


def contents(name: str, options: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Return the SHA-256 of every file of own data, by setting and file name; empty for other tasks."""
    if not is_own_data(name):
        return {}
    sources = {"task": name, **{key: options[key] for key in ("test", "score") if options.get(key)}}
    return {key: data_files.contents(str(source)) for key, source in sources.items()}


def option_types(name: str) -> dict[str, Any]:
    """Return the settings of a task with their types: the parameters of its class besides the data's folder."""
    return _options_of(resolve(name)[1])


def types_of_all_options() -> dict[str, Any]:
    """Return the settings of all tasks with their types."""
    return {option: hint for task in _classes() for option, hint in _options_of(task).items()}


def _options_of(task: type[Task]) -> dict[str, Any]:
    hints = typing.get_type_hints(task.__init__)
    parameters = inspect.signature(task).parameters
    return {option: hints.get(option, Any) for option in parameters if option not in _COMMON}


def described() -> list[tuple[str, str, str]]:
    """Return (name, title, measures) of every task, without loading its data."""
    return [(task.name, task.title, ", ".join(task.measures)) for task in _classes()]


def _classes() -> list[type[Task]]:
    return [*(_known()[name] for name in sorted(_known())), gym.Gym, OwnData]
