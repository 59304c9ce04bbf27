"""A run that was trained before, read from its folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import yaml

from nalora.errors import NALoRAError
from nalora.training import contents
from nalora.training.folder import RunFolder
from nalora.training.settings import Run, check


def read_run(folder: RunFolder) -> Run:
    """The settings of the run in a folder.

    Raises:
        NALoRAError: no run there, or one whose settings cannot be read.
    """
    if not folder.settings.is_file():
        raise NALoRAError(
            str(folder.path), found="no run", expected="a folder that `nalora train` wrote", fix="check the path"
        )
    try:
        given = yaml.safe_load(folder.settings.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise NALoRAError(
            str(folder.settings), found="no YAML", expected="a run's settings", fix="train it again"
        ) from error
    return check(given if isinstance(given, dict) else {}, str(folder.settings))


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


def finished_run(path: str | Path) -> FinishedRun:
    """The run of a folder.

    Raises:
        NALoRAError: no run is there, or one that has not come to its end, or one that diverged.
    """
    folder = RunFolder(path)
    run = read_run(folder)
    refuse_diverged(folder)
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


def refuse_diverged(folder: RunFolder) -> None:
    """Raise what the run ended with, if it diverged: it has no result, and resumed it would diverge again.

    Raises:
        Diverged: it did.
    """
    from nalora.training.divergence import Diverged, advice

    step = diverged_step(folder)
    if step is not None:
        raise Diverged(str(folder.path), step, advice(read_run(folder).settings), folder.latest_checkpoint())
