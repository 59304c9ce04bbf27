"""A lock on a folder for one process at a time: a file that names its owner, and whose mtime is a heartbeat.

On the same host a lock is valid as long as its process lives: after a kill -9 the next process takes it over at once.
Of a process on another host only the last heartbeat is known, so its lock is taken over only on request. The file alone
decides, so it works on every file system; where the system has `flock`, taking the lock is atomic as well.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from nalora.errors import NALoRAError
from nalora.files.atomic import json_text, read_json
from nalora.runs.contents import LOCK
from nalora.runs.marker import MARKER

fcntl: Any = importlib.import_module("fcntl") if importlib.util.find_spec("fcntl") else None  # not on Windows

HEARTBEAT_S = 10.0
# Without flock: how long after writing its name a process checks whether it is still there.
_SETTLE_S = 0.5


class Owner(NamedTuple):
    """The process that holds a lock. `started` distinguishes it from a later process with the same number."""

    host: str
    boot: str
    pid_namespace: str
    pid: int
    started: str
    token: str

    @classmethod
    def here(cls) -> Owner:
        """Return this process."""
        boot = namespace = ""
        with contextlib.suppress(OSError):
            boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
            namespace = os.readlink("/proc/self/ns/pid")  # containers have their own process numbers
        pid = os.getpid()
        return cls(socket.gethostname(), boot, namespace, pid, _start_time(pid) or "", secrets.token_hex(8))


class FolderLock:
    """The lock of a folder with nalora's marker, held from `take` to `release` or in a ``with`` block.

    With `take_over` the lock of a process on another host is taken over.
    """

    def __init__(self, folder: Path, *, take_over: bool = False) -> None:
        self.folder, self.path, self.take_over = folder, folder / LOCK, take_over
        self.lost_to: Owner | None = None
        self._me = Owner.here()
        self._end = threading.Event()
        self._flocked: int | None = None

    def __enter__(self) -> FolderLock:
        self.take()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def take(self) -> None:
        """Become the folder's owner; raise NALoRAError if another process is."""
        with _exclusive(self.folder / MARKER) as exclusive:
            self.refuse_if_owned()
            self._write()
        if not exclusive:
            time.sleep(_SETTLE_S)
            if not self.is_held():
                self._close()
                self.refuse_if_owned()
        threading.Thread(target=self._beat, name="nalora-heartbeat", daemon=True).start()

    def release(self) -> None:
        """Release the lock; one that another process has taken over is left to it."""
        held = self.is_held()
        self._end.set()
        if held:
            self.path.unlink(missing_ok=True)
        self._close()

    def is_held(self) -> bool:
        """Return whether this process is still the owner; a forked child is not."""
        owner = None if self._end.is_set() or os.getpid() != self._me.pid else _read(self.path)
        return owner is not None and owner.token == self._me.token

    def refuse_if_lost(self) -> None:
        """Raise NALoRAError if another host took the lock over: two processes would write into the folder."""
        if self.lost_to is not None:
            raise self._refusal(
                f"that process {self.lost_to.pid} on host {self.lost_to.host} took the folder over",
                "leave the folder to that process; this one has stopped writing",
            )

    def refuse_if_owned(self) -> None:
        """Raise NALoRAError if another process holds the folder; nothing is changed."""
        owner = _read(self.path)
        if (owner is None and not self.path.exists()) or (owner is not None and self._has_ended(owner)):
            return
        at = _mtime(self.path)
        date = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
        heartbeat = f"last heartbeat {max(0.0, time.time() - at):.0f} s ago ({date})"
        if owner is not None and owner[:3] == self._me[:3]:
            raise self._refusal(
                f"process {owner.pid} on this host ({owner.host}) using it, {heartbeat}",
                f"wait until process {owner.pid} ends, or stop it first",
            )
        if self.take_over:
            return
        who = f"the lock of process {owner.pid} on host {owner.host}" if owner else "a lock that cannot be read"
        raise self._refusal(
            f"{who}, {heartbeat}",
            f"wait until it ends or, if it no longer runs, add --take-over (the interval is {HEARTBEAT_S:.0f} s)",
        )

    def _refusal(self, found: str, fix: str) -> NALoRAError:
        return NALoRAError(str(self.folder), found=found, expected="one process at a time", fix=fix)

    def _has_ended(self, owner: Owner) -> bool:
        """Return whether the owner is known not to run any more."""
        if owner[:3] == self._me[:3]:
            return _start_time(owner.pid) != owner.started
        if owner.boot and owner.boot == self._me.boot:
            return _is_unlocked(self.path)  # another container on this machine: only the kernel's lock is visible
        if owner.host == self._me.host and owner.boot:
            return _mtime(self.path) < _booted()  # this host was restarted since
        return False

    def _write(self) -> None:
        """Replace the lock file in one step."""
        partial = self.path.with_name(f".{LOCK}.{self._me.token}")
        self._flocked = os.open(partial, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o644)
        try:
            os.write(self._flocked, (json_text(self._me._asdict()) + "\n").encode())
            os.fsync(self._flocked)
            if fcntl is None:
                self._close()  # Windows cannot rename an open file
            else:
                with contextlib.suppress(OSError):
                    fcntl.flock(self._flocked, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.replace(partial, self.path)
        except BaseException:
            self._close()
            partial.unlink(missing_ok=True)
            raise

    def _beat(self) -> None:
        """Update the heartbeat, and notice if another process has taken the lock over."""
        while not self._end.wait(HEARTBEAT_S):
            with contextlib.suppress(OSError):  # a file system that is temporarily unavailable
                owner = _read(self.path)
                if owner is not None and owner.token != self._me.token:
                    self.lost_to = owner
                    return
                if owner is not None:
                    os.utime(self.path)

    def _close(self) -> None:
        if self._flocked is not None:
            os.close(self._flocked)
            self._flocked = None


@contextlib.contextmanager
def _exclusive(marker: Path) -> Iterator[bool]:
    """Hold the kernel's lock on the marker; yield False where there is none."""
    if fcntl is None:
        yield False
        return
    with marker.open("rb+") as file:
        exclusive = False
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
            exclusive = True
        yield exclusive


def hold_file(path: Path) -> int | None:
    """Create the file if it is new, and hold the kernel's lock on it until the descriptor returned is closed.

    Return None on systems and file systems without such locks; raise BlockingIOError if another process holds it.
    """
    while fcntl is not None:
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Its last owner may have replaced the file since it was opened.
            if os.path.exists(path) and os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            raise
        except OSError:
            os.close(descriptor)
            return None
        os.close(descriptor)
    return None


def _read(path: Path) -> Owner | None:
    """Return the owner that a lock file names; None without a file, or if it cannot be read."""
    content = read_json(path) or {}
    return Owner(*map(content.__getitem__, Owner._fields)) if content.keys() >= {*Owner._fields} else None


def _start_time(pid: int) -> str | None:
    """Return when a process of this host started, in any unit; None if no such process runs."""
    if Path("/proc/self/stat").is_file():
        try:
            stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None
        fields = stat.rpartition(")")[2].split()
        return None if fields[0] in "ZX" else fields[19]
    psutil: Any = importlib.import_module("psutil")  # PEFT depends on it
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else f"{process.create_time():.1f}"
    except psutil.Error:
        return None


def _is_unlocked(path: Path) -> bool:
    """Return whether no process of this machine holds the kernel's lock on the file, as a living owner does."""
    if fcntl is None:
        return False
    try:
        with path.open("rb+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _booted() -> float:
    """Return when this host was started; 0 if unknown."""
    try:
        return time.time() - float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    except (OSError, ValueError):
        return 0.0


def _mtime(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return time.time()
