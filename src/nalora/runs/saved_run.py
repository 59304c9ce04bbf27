"""A run that was trained before, read from its folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nalora.errors import NALoRAError
from nalora.files import yaml_reader
from nalora.runs import contents
from nalora.runs.diverged import Diverged, advice
from nalora.runs.folder import RunFolder
from nalora.runs.paths import from_where_it_was_trained
from nalora.runs.settings import Run, RunSettings, check
from nalora.runs.trust import refuse_untrusted


def read_run(folder: RunFolder, *, trust: bool = False, own: Mapping[str, Any] | None = None) -> Run:
    """The settings of the run in a folder, with paths that lead from here to what they named there.

    Args:
        folder: of the run.
        trust: whether code that its settings name may run, see `nalora.runs.trust`.
        own: the user's own settings of this run, whose code may run anyway.

    Raises:
        NALoRAError: no run there, one whose settings cannot be read, or one that would run code without trust.
    """
    if not folder.settings.is_file():
        raise NALoRAError(
            str(folder.path), found="no run", expected="a folder that `nalora train` wrote", fix="check the path"
        )
    given = yaml_reader.read(folder.settings, "a run's settings", "train it again")
    if not trust:
        refuse_untrusted(given, folder.path, own)
    return check(from_where_it_was_trained(given, folder.path), str(folder.settings))


def refuse_unless_own(folder: RunFolder, *names: str) -> None:
    """Refuse to write these into a folder that is not a run of nalora's, or out of it through a symbolic link.

    Raises:
        NALoRAError: it is not, or does.
    """
    if not contents.is_run(folder.path):
        raise NALoRAError(
            str(folder.path),
            found="a folder that nalora did not make",
            expected="a run's, to write results into",
            fix="give the folder that `nalora train` wrote; for an evaluation --output FOLDER writes elsewhere",
        )
    contents.refuse_odd_entries(folder.path, *names)


@dataclass(frozen=True)
class FinishedRun:
    """What a finished run was told, and where what it trained is."""

    folder: RunFolder
    run: Run
    trained: Path


def finished_run(path: str | Path, *, trust: bool = False, own: Mapping[str, Any] | None = None) -> FinishedRun:
    """The run of a folder.

    Args:
        path: the folder.
        trust: whether code that its settings name may run.
        own: the user's own settings of this run, whose code may run anyway.

    Raises:
        NALoRAError: no run is there, one that is not finished or diverged, or one that would run code without
            trust.
    """
    folder = RunFolder(path)
    run = read_run(folder, trust=trust, own=own)
    refuse_diverged(folder, run.settings)
    if not folder.result.is_file() or not folder.trained.is_dir():
        raise NALoRAError(
            str(path), found="an unfinished run", expected="a finished one", fix="nalora train … --resume"
        )
    return FinishedRun(folder, run, folder.trained)


def diverged_step(folder: RunFolder) -> int | None:
    """The step at which the run in a folder diverged; None where it did not, or has not ended."""
    try:
        result = json.loads(folder.result.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return int(result.get("diverged_step") or 0) if isinstance(result, dict) and result.get("diverged") else None


def refuse_diverged(folder: RunFolder, settings: RunSettings) -> None:
    """Raise what the run ended with, if it diverged: it has no result, and resumed it would diverge again.

    Args:
        folder: of the run.
        settings: of the run, for the advice.

    Raises:
        Diverged: it did.
    """
    step = diverged_step(folder)
    if step is not None:
        raise Diverged(str(folder.path), step, advice(settings), folder.latest_checkpoint(before=step))
