"""Code that settings would execute: a folder from somebody else runs nothing without consent.

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
from nalora.files import expanded, python_files

# Whoever decides must see the whole path of the code.
_LONGEST = 400
# Settings that name a method or a task, by name or by a Python file, which is then run.
CODE = ("method", "on", "task")


def consequences(options: Mapping[str, Any], folder: Path | None = None) -> dict[str, str]:
    """Return, by setting, what unchecked settings would do beyond loading weights and data.

    A file inside the run's `folder` may be written.
    """

    def shown(name: str) -> str:
        return shortened(str(options.get(name)), _LONGEST)

    clauses: dict[str, str] = {}
    for name in CODE:
        if file := python_files.split(options.get(name)):
            clauses[name] = f"run the Python file {shortened(file[0], _LONGEST)} ({name})"
    if options.get("score"):
        clauses["score"] = f"run the Python file {shown('score')} (score)"
    if options.get("trust_remote_code"):
        model = f"run the Python code that comes with the model {shown('model')}"
        clauses["trust_remote_code"] = f"{model} (trust_remote_code)"
    if "/" in str(options.get("attention")):
        clauses["attention"] = f"run the attention kernel {shown('attention')}, code from the hub (attention)"
    if options.get("unsafe_code"):
        clauses["unsafe_code"] = "run programs that the model writes without a sandbox (unsafe_code)"
    url = options.get("judge_url")
    if url and url != os.environ.get("OPENAI_BASE_URL"):
        clauses["judge_url"] = f"send OPENAI_API_KEY to {shown('judge_url')} (judge_url)"
    record = options.get("judgements")
    if record and not (folder and expanded(str(record)).resolve().is_relative_to(folder.resolve())):
        clauses["judgements"] = f"write to the file {shown('judgements')} (judgements)"
    return clauses


def refuse_untrusted(options: Mapping[str, Any], folder: Path, own: Mapping[str, Any] | None = None) -> None:
    """Raise NALoRAError if the options in a run.yaml would execute code or send a key.

    What the user's `own` settings of the same run name as well, as a study's do, is allowed.
    """
    clauses = [
        clause
        for name, clause in consequences(options, folder).items()
        if own is None or own.get(name) != options.get(name)
    ]
    if clauses:
        raise _refusal(folder / "run.yaml", f"settings that would {' and '.join(clauses)}", "a run", "made this folder")


def refuse_untrusted_study(options: Mapping[str, Any], file: Path) -> None:
    """Raise NALoRAError for a study whose methods or tasks are Python files, which checking the study would run."""
    if files := sorted(set(_python_files(options))):
        code = ", ".join(shortened(name, _LONGEST) for name in files)
        raise _refusal(file, f"a study that would run {code}", "a study", "wrote it")


def _refusal(path: Path, found: str, kind: str, author: str) -> NALoRAError:
    return NALoRAError(
        str(path),
        found=found,
        expected=f"{kind} of your own, or one whose code you have read",
        fix=f"add --trust if you trust whoever {author}",
    )


def _python_files(options: Any) -> Iterator[str]:
    """Yield the Python files in any part of a study: settings of all runs, an arm or a combination, lists of values."""
    for name, value in options.items() if isinstance(options, Mapping) else ():
        for item in value if isinstance(value, list) else [value]:
            if name in CODE and (file := python_files.split(item)):
                yield file[0]
            yield from _python_files(item)
