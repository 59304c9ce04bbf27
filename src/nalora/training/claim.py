"""A run's folder is claimed and locked before anything is loaded, and cleaned up where the run fails before a step."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import NamedTuple, NoReturn

from nalora.distributed import processes
from nalora.distributed.processes import is_first_process
from nalora.errors import NALoRAError, unusable
from nalora.files import atomic
from nalora.runs import checkpoints, contents, marker
from nalora.runs.folder import RunFolder, read_jsonl
from nalora.runs.lock import FolderLock
from nalora.runs.settings import Run
from nalora.runs.writable import refuse_unusable

# By default they end the process at once and leave the lock and the files of the start. Windows has no SIGHUP.
_DEADLY = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))


class Claim(NamedTuple):
    """What a run gets with its folder.

    Args:
        checkpoint: that all processes resume from, None for a start from the beginning.
        lock: held by the first process, None in the others.
        notices: what a user should know of the checkpoints.
    """

    checkpoint: Path | None
    lock: FolderLock | None
    notices: list[str]


@contextlib.contextmanager
def claimed(folder: RunFolder, run: Run, *, resume: bool, device: str, take_over: bool = False) -> Iterator[Claim]:
    """The folder, the run's own and locked until the end.

    A start that fails before its first step, by a wrong layer's name, too large a batch or SIGTERM, leaves a folder in
    which the corrected run may start: what this process created is removed, and nothing else. A resumed run keeps its
    files.

    Raises:
        NALoRAError: the folder is not nalora's, another run's or in use, or not every process can see it.
    """
    with _signals_exit(), contextlib.ExitStack() as held:
        claim = _open_together(folder, run, resume, device, take_over, held)
        yield claim


@contextlib.contextmanager
def _signals_exit() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise SystemExit, so that what holds the folder is cleaned up on the way out.

    Only in the process that holds the lock: another one, waiting for it inside a collective, would not notice.
    A signal that is ignored, as SIGHUP under nohup, or that the program handles itself keeps its meaning.
    """
    replaced = []
    if is_first_process() and threading.current_thread() is threading.main_thread():
        replaced = [number for number in _DEADLY if signal.getsignal(number) == signal.SIG_DFL]
    for number in replaced:
        signal.signal(number, _exit)
    try:
        yield
    finally:
        for number in replaced:
            if signal.getsignal(number) is _exit:
                signal.signal(number, signal.SIG_DFL)


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)  # what a shell reports for a process that the signal ended


def step_of(checkpoint: Path | None) -> int:
    """The step after which it was written; 0 for None, a start."""
    return checkpoints.step_in(checkpoint.name) or 0 if checkpoint else 0


def _open_together(
    folder: RunFolder, run: Run, resume: bool, device: str, take_over: bool, held: contextlib.ExitStack
) -> Claim:
    """What the first process refuses, all refuse."""
    claim, refused = Claim(None, None, []), None
    if is_first_process():
        try:
            if os.path.lexists(folder.path):  # before a file is created in it to try whether that works
                if marker.is_marked(folder.path, "run"):
                    FolderLock(folder.path, take_over=take_over).refuse_a_living_owner()
                folder.refuse(run.to_dict(), resume=resume)
            refuse_unusable(folder.path, "give another output=, or the right to write there")
            claim = _open(folder, run, resume, take_over, held)
        except NALoRAError as error:
            refused = error
        except OSError as error:
            refused = unusable(
                folder.path, "written", error, "a folder to write to", "make it writable, or give another output="
            )
    if processes.any_process(refused is not None, device):
        raise refused or NALoRAError(
            str(folder.path), found="that the first process refuses it", expected="its message", fix="do as that says"
        )
    step = processes.broadcast_from_first(step_of(claim.checkpoint), device)
    if processes.any_process(not folder.settings.is_file(), device):
        raise NALoRAError(
            str(folder.path),
            found="a folder that not every process can see",
            expected="one that all nodes share: checkpoints and starts are kept in it",
            fix="give an output= on a shared file system",
        )
    return claim._replace(checkpoint=folder.checkpoints / f"checkpoint-{step}" if step else None)


def _open(folder: RunFolder, run: Run, resume: bool, take_over: bool, held: contextlib.ExitStack) -> Claim:
    """Check, mark, lock, check again now that nobody else can change anything, then write."""
    settings, notices = run.to_dict(), list[str]()
    folder.refuse(settings, resume=resume)
    made = folder.mark()
    lock = FolderLock(folder.path, take_over=take_over)
    lock.take()
    # What is registered last runs first: under the lock the files of a failed start are removed, then it is released.
    if made.folder:
        held.callback(_remove_if_empty, folder.path)
    held.callback(lock.release)
    folder.refuse(settings, resume=resume)
    if not resume:
        held.push(lambda kind, error, trace: _clean_up(folder, made) if kind and lock.is_held() else None)
    return Claim(folder.open(settings, resume=resume, say=notices.append), lock, notices)


def _clean_up(folder: RunFolder, made: marker.Made) -> None:
    """Remove what this process created for a start that failed; a run that has trained stays.

    The name alone says too little: somebody may have put a file there while the model was loaded.
    """
    if read_jsonl(folder.metrics) or checkpoints.marked_complete(folder.checkpoints):
        return
    for entry in contents.own_entries(folder.path):
        if entry.name in contents.WHOLE_FOLDERS and not entry.is_symlink():
            _remove_created(entry.rglob("*"))
            _remove_if_empty(entry)
        elif made.marker if entry.name == marker.MARKER else atomic.created_here(entry):
            _remove_created([entry], anyway=True)
    # Loggers begin their files before the first step; the process is part of their names.
    own_events = f"events.out.tfevents.*.{os.getpid()}.*"
    _remove_created(folder.checkpoints.rglob(own_events), anyway=True)
    for place in (folder.checkpoints, folder.snapshots):
        for inner in sorted(place.rglob("*"), reverse=True):
            _remove_if_empty(inner)
        _remove_if_empty(place)


def _remove_created(entries: Iterable[Path], *, anyway: bool = False) -> None:
    for entry in list(entries):
        if entry.name == contents.LOCK or not (anyway or atomic.created_here(entry)):
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):  # no folder, or somebody else's files are in it
        folder.rmdir()
