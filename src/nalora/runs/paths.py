"""Where a run was started, so that the relative paths among its settings lead somewhere from every folder."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nalora.files import python_files
from nalora.runs.trust import CODE

WORKING_DIRECTORY = "working_directory"
# Settings that may be a path; a hub id is no file there and stays what it is. So does the name of a method or a task.
_PATHS = ("model", "data_dir", "like", *CODE)


def working_directory(folder: Path) -> str:
    """The current folder as seen from the run's: a project that is moved as a whole stays whole."""
    try:
        return os.path.relpath(Path.cwd(), folder.resolve())
    except ValueError:  # on another drive of Windows
        return str(Path.cwd())


def from_where_it_was_trained(given: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The settings of a run, with absolute paths in place of relative ones where it was started in another folder.

    Args:
        given: what its run.yaml says.
        folder: of the run.
    """
    settings = dict(given)
    started = _started(folder)
    if started is None or started == Path.cwd():
        return settings
    for name in _PATHS:
        value = settings.get(name)
        python_file = python_files.split(value)
        file = python_file[0] if python_file else value
        if (name in CODE and not python_file) or not isinstance(file, str) or Path(file).is_absolute():
            continue
        if _exists(started / file):
            settings[name] = str(started / str(value))
    return settings


def _started(folder: Path) -> Path | None:
    """None of a run that does not say: version 0.1 did not."""
    try:
        recorded = json.loads((folder / "environment.json").read_text(encoding="utf-8")).get(WORKING_DIRECTORY)
        return (folder / recorded).resolve() if isinstance(recorded, str) else None
    except (OSError, ValueError, AttributeError):
        return None


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):
        return False
