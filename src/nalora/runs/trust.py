"""What a run's settings would execute: nothing of a folder that somebody else made runs without consent.

`nalora train` runs what the user's own file names. A run's folder may come from anywhere, and commands that read one
(evaluate, diagnose) would import the Python files of its method and its task and the code of its model. They refuse
without --trust.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nalora.errors import NALoRAError, shortened
from nalora.files import python_files

# Whoever decides must see the whole path of what would run.
_LONGEST = 400

# Settings that name a method or a task: by a name of nalora's own, or by a Python file that is then run.
CODE = ("method", "on", "task")


def consequences(given: Mapping[str, Any], folder: Path | None = None) -> dict[str, str]:
    """What the settings would do beyond loading weights and data, by setting: a clause for each, empty where nothing.

    Args:
        given: settings as they stand in the file; nothing of them is checked or run.
        folder: of the run; a file inside it may be written.
    """
    found: dict[str, str] = {}
    for name in CODE:
        if place := python_files.split(given.get(name)):
            found[name] = f"run the Python file {shortened(place[0], _LONGEST)} ({name})"
    if given.get("trust_remote_code"):
        found["trust_remote_code"] = (
            f"run the Python code that comes with the model {shortened(str(given.get('model')), _LONGEST)}"
            " (trust_remote_code)"
        )
    if given.get("unsafe_code"):
        found["unsafe_code"] = "run programs that the model writes without a sandbox (unsafe_code)"
    url = given.get("judge_url")
    if url and url != os.environ.get("OPENAI_BASE_URL"):
        found["judge_url"] = f"send OPENAI_API_KEY to {shortened(str(url), _LONGEST)} (judge_url)"
    record = given.get("judgements")
    if record and not (folder and _is_inside(Path(str(record)), folder)):
        found["judgements"] = f"write to the file {shortened(str(record), _LONGEST)} (judgements)"
    return found


def refuse_untrusted(given: Mapping[str, Any], folder: Path, own: Mapping[str, Any] | None = None) -> None:
    """Refuse a run's settings that would execute code, or worse.

    Args:
        given: what the run.yaml says.
        folder: of the run.
        own: the user's own settings of the same run, as a study has them: what they name as well is no surprise.

    Raises:
        NALoRAError: it names what would be executed.
    """
    found = {
        name: clause
        for name, clause in consequences(given, folder).items()
        if own is None or own.get(name) != given.get(name)
    }
    if found:
        raise NALoRAError(
            str(folder / "run.yaml"),
            found=f"settings that would {' and '.join(found.values())}",
            expected="a run of your own, or one whose code you have read",
            fix="add --trust if you trust whoever made this folder",
        )


def refuse_untrusted_study(given: Mapping[str, Any], file: Path) -> None:
    """Refuse to look at a study whose methods or tasks are Python files, which checking it would run.

    Raises:
        NALoRAError: it names the files.
    """
    found = sorted(set(_python_files(given)))
    if found:
        raise NALoRAError(
            str(file),
            found=f"a study that would run {', '.join(shortened(each, _LONGEST) for each in found)}",
            expected="a study of your own, or one whose code you have read",
            fix="add --trust if you trust whoever wrote it",
        )


def _python_files(given: Any) -> Iterator[str]:
    """Of any part of a study: settings of all runs, of an arm, of a combination, and lists of a setting's values."""
    if isinstance(given, Mapping):
        for name, value in given.items():
            values = value if isinstance(value, list) else [value]
            if name in CODE:
                yield from (place[0] for value in values if (place := python_files.split(value)))
            for each in values:
                yield from _python_files(each)


def _is_inside(path: Path, folder: Path) -> bool:
    return path.expanduser().resolve().is_relative_to(folder.resolve())
