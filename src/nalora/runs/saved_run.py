"""Runs that were trained before, read from their folders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nalora import tasks
from nalora.errors import NALoRAError
from nalora.files import python_files, yaml_reader
from nalora.files.atomic import read_json
from nalora.runs import contents
from nalora.runs.conversion import key_values
from nalora.runs.folder import RunFolder
from nalora.runs.provenance import WORKING_DIRECTORY
from nalora.runs.settings import Run, RunSettings, check, read
from nalora.runs.trust import CODE, refuse_untrusted

# Settings that may be a path. A hub id, or the name of a method or a task, is not a file there and stays unchanged.
_PATHS = ("model", "data_dir", "like", "test", "score", *CODE)


class Diverged(NALoRAError):  # noqa: N818 - the name that studies and users know it by
    """Loss or gradients of a run became non-finite; `step` is the first such step, `checkpoint` the last good one."""

    def __init__(self, where: str, step: int, advice: str, checkpoint: Path | None = None) -> None:
        self.step = step
        last = f"; the last good checkpoint is {checkpoint}" if checkpoint else ""
        super().__init__(
            where,
            found=f"a run that diverged: loss or gradients are not finite from step {step} on{last}",
            expected="finite numbers to the end",
            fix=advice,
        )


def advice(settings: RunSettings) -> str:
    """Return what to try against divergence, by what the run has not tried yet."""
    dtypes = {"float16": "use dtype: bfloat16 or float32", "bfloat16": "use dtype: float32"}
    steps = (
        f"lower learning_rate (it was {settings.learning_rate:g})",
        "raise warmup" if settings.warmup else "set warmup: 0.03",
        f"lower max_norm ({settings.max_norm:g})" if settings.max_norm else "clip gradients with max_norm: 1.0",
        dtypes.get(settings.dtype or "", "keep dtype: float32"),
    )
    return f"start another run, with another output=: {', '.join(steps)}"


def read_run(folder: RunFolder, *, trust: bool = False, own: Mapping[str, Any] | None = None) -> Run:
    """Return the settings of a run, with relative paths resolved from the folder in which it was started.

    With `trust`, code that its settings name may run, see `nalora.runs.trust`; without it, only code that the user's
    `own` settings of this run name as well.

    Raises:
        NALoRAError: no run there, settings that cannot be read, or settings that would run code without trust.
    """
    if not folder.settings.is_file():
        expected = "a folder that `nalora train` wrote"
        raise NALoRAError(str(folder.path), found="no run", expected=expected, fix="check the path")
    options = yaml_reader.read(folder.settings, "a run's settings", "train it again")
    if not trust:
        refuse_untrusted(options, folder.path, own)
    return check(_with_absolute_paths(options, folder.path), str(folder.settings))


def started_run(path: Path, overrides: Sequence[str], *, trust: bool = False) -> Run:
    """Return the run in a folder, to be trained on; ``key=value`` arguments replace its settings.

    Raises:
        NALoRAError: wrong settings, or settings that would run code without trust.
    """
    folder = RunFolder(path)
    if not trust:
        refuse_untrusted(yaml_reader.read(folder.settings, "a run's settings", "train it again"), path)
    run = read(folder.settings, overrides)
    # The folder may have been moved, or the command be typed elsewhere.
    output = run.settings.output if "output" in key_values(overrides) else str(path)
    return replace(run, settings=replace(run.settings, output=output))


def _with_absolute_paths(options: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the settings with absolute in place of relative paths, if the run was started in another folder."""
    settings = dict(options)
    recorded = (read_json(folder / "environment.json") or {}).get(WORKING_DIRECTORY)
    # Version 0.1 did not record it.
    started = (folder / recorded).resolve() if isinstance(recorded, str) else Path.cwd()
    for name in _PATHS if started != Path.cwd() else ():
        value = settings.get(name)
        python_file = python_files.split(value)
        file = python_file[0] if python_file else value
        named = name in CODE and not python_file and not (name == "task" and _may_be_data(value))
        if named or not isinstance(file, str) or Path(file).is_absolute():
            continue
        try:
            if (started / file).exists():
                settings[name] = str(started / str(value))
        except (OSError, ValueError):  # no file can have that name
            continue
    return settings


def _may_be_data(task: Any) -> bool:
    """Return whether a task's name is none of the known ones, so that it can be a data file or a folder."""
    return isinstance(task, str) and task not in tasks.names() and not task.startswith("gym/")


def refuse_unless_own(folder: RunFolder, *names: str) -> None:
    """Raise NALoRAError if the folder is not a run of nalora's, or one of these entries is not a plain one in it."""
    if not contents.is_run(folder.path):
        raise NALoRAError(
            str(folder.path),
            found="a folder that nalora did not make",
            expected="a run's, to write results into",
            fix="give the folder that `nalora train` wrote; for an evaluation --output FOLDER writes elsewhere",
        )
    contents.refuse_wrong_types(folder.path, *names)


@dataclass(frozen=True)
class FinishedRun:
    """A finished run: its folder, its settings, and the folder of the trained adapter or model."""

    folder: RunFolder
    run: Run
    trained: Path


def finished_run(path: str | Path, *, trust: bool = False, own: Mapping[str, Any] | None = None) -> FinishedRun:
    """Return the finished run in a folder; `trust` and `own` as in `read_run`.

    Raises:
        NALoRAError: as `read_run`, or the run is not finished or has diverged.
    """
    folder = RunFolder(path)
    run = read_run(folder, trust=trust, own=own)
    refuse_diverged(folder, run.settings)
    if not folder.result.is_file() or not folder.trained.is_dir():
        fix = f"continue it with `{folder.resume_command()}`"
        raise NALoRAError(str(path), found="an unfinished run", expected="a finished one", fix=fix)
    return FinishedRun(folder, run, folder.trained)


def diverged_step(folder: RunFolder) -> int | None:
    """Return the step at which a run diverged; None if it did not, or has not ended."""
    result = read_json(folder.result) or {}
    return int(result.get("diverged_step") or 0) if result.get("diverged") else None


def refuse_diverged(folder: RunFolder, settings: RunSettings) -> None:
    """Raise Diverged for a run that diverged: it has no result, and would diverge again if it were resumed."""
    if (step := diverged_step(folder)) is not None:
        raise Diverged(str(folder.path), step, advice(settings), folder.latest_checkpoint(before=step))
