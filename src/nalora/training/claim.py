"""A run's folder is claimed before anything is loaded, and given back where the run fails before its first step."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from nalora import processes
from nalora.errors import NALoRAError
from nalora.processes import is_first_process
from nalora.training.folder import RunFolder, read_jsonl
from nalora.training.settings import Run


@contextlib.contextmanager
def claimed(folder: RunFolder, run: Run, *, resume: bool, device: str) -> Iterator[Path | None]:
    """The folder, the run's own from here on; the checkpoint that all processes resume from, None for a start.

    A start that fails before its first step, by a wrong layer's name or too large a batch, leaves a folder in which
    the corrected run may start. What was there to be resumed stays.

    Raises:
        NALoRAError: the folder is another run's, or not every process can see it.
    """
    checkpoint = _open_together(folder, run, resume, device)
    try:
        yield checkpoint
    except BaseException:
        if not resume and is_first_process() and not _has_trained(folder):
            _give_back(folder)
        raise


def step_of(checkpoint: Path | None) -> int:
    """The step after which it was written; 0 for None, a start."""
    return int(checkpoint.name.rpartition("-")[2]) if checkpoint else 0


def _open_together(folder: RunFolder, run: Run, resume: bool, device: str) -> Path | None:
    """What the first process refuses, all refuse."""
    checkpoint, refused = None, None
    if is_first_process():
        try:
            checkpoint = folder.open(run.to_dict(), resume=resume)
        except NALoRAError as error:
            refused = error
    if processes.any_of(refused is not None, device):
        raise refused or NALoRAError(
            str(folder.path), found="that the first process refuses it", expected="its message", fix="do as that says"
        )
    step = processes.of_first(step_of(checkpoint), device)
    if processes.any_of(not folder.settings.is_file(), device):
        raise NALoRAError(
            str(folder.path),
            found="a folder that not every process can see",
            expected="one that all nodes share: checkpoints and starts are kept in it",
            fix="give an output= on a shared file system",
        )
    return folder.checkpoints / f"checkpoint-{step}" if step else None


def _has_trained(folder: RunFolder) -> bool:
    """Whether a step was logged, as the first one always is, or there is a checkpoint."""
    return bool(read_jsonl(folder.metrics)) or folder.latest_checkpoint() is not None


def _give_back(folder: RunFolder) -> None:
    """Remove what a run writes up to its first step; a method's start is removed by the next run."""
    for file in (folder.settings, folder.path / "environment.json", folder.metrics, folder.gates, folder.diagnosis):
        file.unlink(missing_ok=True)
    for part in (folder.snapshots, folder.checkpoints):
        shutil.rmtree(part, ignore_errors=True)
    with contextlib.suppress(OSError):  # somebody else's files are in it
        folder.path.rmdir()
