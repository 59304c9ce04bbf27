"""One process at a time in a folder: a lock file that names its owner, whose heartbeat other hosts can see.

On the same host a lock counts as long as its process lives: after a kill -9 the next process takes it over at once.
Of a process on another host only the time of its last heartbeat is known, so its lock is taken over only on request.
The file alone decides, so it works on every file system; where the system has `flock`, deciding is exclusive as well.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from nalora.errors import NALoRAError
from nalora.files.atomic import json_text
from nalora.runs.contents import LOCK
from nalora.runs.marker import MARKER

fcntl: Any = importlib.import_module("fcntl") if importlib.util.find_spec("fcntl") else None  # not on Windows

HEARTBEAT_S = 10.0
# Where nothing makes the decision exclusive: so long after writing its name a process looks whether it is still there.
_SETTLE_S = 0.5


class Owner(NamedTuple):
    """The process that holds a lock. `started` distinguishes it from a later one with the same number."""

    host: str
    boot: str
    pid_namespace: str
    pid: int
    started: str
    token: str

    @classmethod
    def here(cls) -> Owner:
        """This process."""
        return cls(*_machine(), os.getpid(), _started(os.getpid()) or "", secrets.token_hex(8))


class FolderLock:
    """Held from `take` to `release`, or through a ``with``.

    Args:
        folder: with nalora's marker in it.
        take_over: whether the lock of a process on another host is taken over.
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def take(self) -> None:
        """Become the folder's owner.

        Raises:
            NALoRAError: another process is.
        """
        with _one_decides(self.folder / MARKER) as exclusive:
            self.refuse_a_living_owner()
            self._write()
        if not exclusive:
            time.sleep(_SETTLE_S)
            if (owner := _read(self.path)) is None or owner.token != self._me.token:
                self._close()
                self.refuse_a_living_owner()
        threading.Thread(target=self._beat, name="nalora-heartbeat", daemon=True).start()

    def release(self) -> None:
        """Give it up; a lock that another process took over since is left to that."""
        held = self.is_held()
        self._end.set()
        if held:
            self.path.unlink(missing_ok=True)
        self._close()

    def is_held(self) -> bool:
        """Whether this process is still the owner; a forked child is none."""
        owner = None if self._end.is_set() or os.getpid() != self._me.pid else _read(self.path)
        return owner is not None and owner.token == self._me.token

    def refuse_if_lost(self) -> None:
        """Stop a process whose lock was taken over from another host while it could not be seen.

        Raises:
            NALoRAError: two processes would write into the folder.
        """
        if self.lost_to is not None:
            raise NALoRAError(
                str(self.folder),
                found=f"that process {self.lost_to.pid} on host {self.lost_to.host} took the folder over",
                expected="one process at a time",
                fix="leave the folder to that process; this one has stopped writing",
            )

    def refuse_a_living_owner(self) -> None:
        """Refuse a folder that another process holds. Nothing is touched.

        Raises:
            NALoRAError: it names the process.
        """
        owner = _read(self.path)
        if owner is None and not self.path.exists():
            return
        if owner is not None and self._has_ended(owner):
            return
        seen = _last_heartbeat(self.path)
        if owner is not None and owner[:3] == self._me[:3]:
            raise NALoRAError(
                str(self.folder),
                found=f"process {owner.pid} on this host ({owner.host}) at work in it, last heartbeat {seen}",
                expected="one process at a time",
                fix=f"wait until process {owner.pid} ends, or stop it first",
            )
        if self.take_over:
            return
        who = f"the lock of process {owner.pid} on host {owner.host}" if owner else "a lock that cannot be read"
        raise NALoRAError(
            str(self.folder),
            found=f"{who}, last heartbeat {seen}",
            expected="one process at a time",
            fix=f"wait until it ends or, if it no longer runs, add --take-over (a heartbeat comes every"
            f" {HEARTBEAT_S:.0f} s)",
        )

    def _has_ended(self, owner: Owner) -> bool:
        """Whether the owner is known not to run any more."""
        if owner[:3] == self._me[:3]:
            return _started(owner.pid) != owner.started
        if owner.boot and owner.boot == self._me.boot:
            return _is_unlocked(self.path)  # another container on this machine, where only the kernel's lock tells
        if owner.host == self._me.host and owner.boot:
            return _mtime(self.path) < _booted()  # this host was restarted since
        return False

    def _write(self) -> None:
        """Put the lock in place, whole, whatever was there."""
        partial = self.path.with_name(f".{LOCK}.{self._me.token}")
        self._flocked = os.open(partial, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o644)
        try:
            os.write(self._flocked, (json_text(self._me._asdict()) + "\n").encode())
            os.fsync(self._flocked)
            if fcntl is None:
                self._close()  # Windows moves no open file
            else:
                with contextlib.suppress(OSError):
                    fcntl.flock(self._flocked, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.replace(partial, self.path)
        except BaseException:
            self._close()
            partial.unlink(missing_ok=True)
            raise

    def _beat(self) -> None:
        """Say from time to time that the process lives, and notice if the lock is another's now."""
        while not self._end.wait(HEARTBEAT_S):
            with contextlib.suppress(OSError):  # a file system that is away for a moment
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
def _one_decides(marker: Path) -> Iterator[bool]:
    """Whether no other process decides at the same time: by the kernel's lock on the marker, where there is one."""
    if fcntl is None:
        yield False
        return
    with marker.open("rb+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:  # a file system without locks
            exclusive = False
        else:
            exclusive = True
        yield exclusive


def _read(path: Path) -> Owner | None:
    """The owner that a lock file names; None where there is no file, or none that can be read."""
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return Owner(**{name: content[name] for name in Owner._fields})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _machine() -> tuple[str, str, str]:
    """The host's name, its present boot, and whose process numbers count: containers have their own."""
    boot = namespace = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        namespace = os.readlink("/proc/self/ns/pid")
    return socket.gethostname(), boot, namespace


def _started(pid: int) -> str | None:
    """When a process of this host started, in some unit; None where no such process runs."""
    processes = Path("/proc")
    if (processes / "self" / "stat").is_file():
        try:
            fields = (
                (processes / str(pid) / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            )
        except OSError:
            return None
        return None if fields[0] in "ZX" else fields[19]
    if importlib.util.find_spec("psutil") is None:
        return ""  # nobody can say; it counts as alive
    psutil: Any = importlib.import_module("psutil")
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else f"{process.create_time():.1f}"
    except psutil.Error:
        return None


def _is_unlocked(path: Path) -> bool:
    """Whether no process on this machine holds the kernel's lock on the file, as its owner does while it lives."""
    if fcntl is None:
        return False
    try:
        with path.open("rb+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _booted() -> float:
    """When this host was started; 0 where it does not say."""
    try:
        return time.time() - float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    except (OSError, ValueError):
        return 0.0


def _mtime(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return time.time()


def _last_heartbeat(path: Path) -> str:
    at = _mtime(path)
    return f"{max(0.0, time.time() - at):.0f} s ago ({time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(at))})"
