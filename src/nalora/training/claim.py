"""A run's folder is claimed and locked before anything is loaded, and cleaned up if the run fails before a step."""

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
from nalora.runs.writable import refuse_unwritable

# By default these end the process at once and leave the lock and the first files. Windows has no SIGHUP.
_DEADLY = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))


class Claim(NamedTuple):
    """A claimed folder: the checkpoint to resume from, the first process's lock, and notices of damaged checkpoints."""

    checkpoint: Path | None
    lock: FolderLock | None
    notices: list[str]


@contextlib.contextmanager
def claimed(folder: RunFolder, run: Run, *, resume: bool, device: str, take_over: bool = False) -> Iterator[Claim]:
    """Claim the folder for this run and lock it until the end.

    A start that fails before its first step, by a wrong layer name, too large a batch or SIGTERM, leaves a folder in
    which the corrected run may start: what this process created is removed, and nothing else. A resumed run keeps its
    files.

    Raises:
        NALoRAError: the folder is not nalora's, belongs to another run, is in use, or is not visible to every process.
    """
    with _signals_exit(), contextlib.ExitStack() as cleanup:
        yield _claim_in_all_processes(folder, run, resume, device, take_over, cleanup)


@contextlib.contextmanager
def _signals_exit() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise SystemExit, so that the folder is cleaned up.

    Only in the process that holds the lock: another one, which waits for it inside a collective, would not react.
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
    raise SystemExit(128 + number)  # as a shell reports a process that the signal ended


def step_of(checkpoint: Path | None) -> int:
    """Return the step after which a checkpoint was written; 0 for None, a new start."""
    return checkpoints.step_in(checkpoint.name) or 0 if checkpoint else 0


def _claim_in_all_processes(
    folder: RunFolder, run: Run, resume: bool, device: str, take_over: bool, cleanup: contextlib.ExitStack
) -> Claim:
    """Claim the folder in the first process; if it is refused there, raise NALoRAError in all."""
    claim, refusal = Claim(None, None, []), None
    if is_first_process():
        try:
            claim = _claim(folder, run, resume, take_over, cleanup)
        except NALoRAError as error:
            refusal = error
        except OSError as error:
            fix = "make it writable, or give another output="
            refusal = unusable(folder.path, "written", error, "a folder to write to", fix)
    if processes.any_process(refusal is not None, device):
        raise refusal or NALoRAError(
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
    return claim._replace(checkpoint=folder.checkpoint(step) if step else None)


def _claim(folder: RunFolder, run: Run, resume: bool, take_over: bool, cleanup: contextlib.ExitStack) -> Claim:
    """Check, mark, lock, check again now that no other process can change anything, then write."""
    settings, notices, lock = run.to_dict(), list[str](), FolderLock(folder.path, take_over=take_over)
    if os.path.lexists(folder.path):  # checked before a file is created in it to test that it is writable
        if marker.is_marked(folder.path, "run"):
            lock.refuse_if_owned()
        folder.refuse(settings, resume=resume)
    refuse_unwritable(folder.path, "give another output=, or the right to write there")
    folder.refuse(settings, resume=resume)
    made = folder.mark()
    lock.take()
    # The last callback runs first: the files of a failed start are removed under the lock, which is then released.
    if made.folder:
        cleanup.callback(_remove_if_empty, folder.path)
    cleanup.callback(lock.release)
    folder.refuse(settings, resume=resume)
    if not resume:
        cleanup.push(lambda kind, error, trace: _clean_up(folder, made) if kind and lock.is_held() else None)
    return Claim(folder.open(settings, resume=resume, notify=notices.append), lock, notices)


def _clean_up(folder: RunFolder, made: marker.Made) -> None:
    """Remove what this process created for a start that failed; a run that has trained stays.

    A name alone is not enough: the user may have put a file there while the model was loaded.
    """
    if read_jsonl(folder.metrics) or checkpoints.marked_complete(folder.checkpoints):
        return
    for entry in contents.own_entries(folder.path):
        if entry.name in contents.WHOLE_FOLDERS and not entry.is_symlink():
            _remove(path for path in entry.rglob("*") if atomic.created_here(path))
            _remove_if_empty(entry)
        elif made.marker if entry.name == marker.MARKER else atomic.created_here(entry):
            _remove([entry])
    # Loggers create their files before the first step; the names contain the process number.
    _remove(folder.checkpoints.rglob(f"events.out.tfevents.*.{os.getpid()}.*"))
    for place in (folder.checkpoints, folder.snapshots):
        for path in (*sorted(place.rglob("*"), reverse=True), place):
            _remove_if_empty(path)


def _remove(paths: Iterable[Path]) -> None:
    for path in [path for path in paths if path.name != contents.LOCK]:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):  # not a folder, or not empty
        folder.rmdir()
