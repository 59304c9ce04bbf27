"""A run that was trained before, read from its folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml

from nalora.errors import NALoRAError
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


@dataclass(frozen=True)
class FinishedRun:
    """What a finished run was told, and where what it trained is."""

    folder: RunFolder
    run: Run
    trained: Path


def finished_run(path: str | Path) -> FinishedRun:
    """The run of a folder.

    Raises:
        NALoRAError: no run is there, or one that has not come to its end.
    """
    folder = RunFolder(path)
    run = read_run(folder)
    if not folder.result.is_file() or not folder.trained.is_dir():
        raise NALoRAError(
            str(path), found="an unfinished run", expected="a finished one", fix="nalora train … --resume"
        )
    return FinishedRun(folder, run, folder.trained)
