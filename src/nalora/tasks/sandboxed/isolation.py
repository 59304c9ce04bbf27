"""Take rights away from this process with Linux namespaces, mounts, resource limits and a system call filter.

`enter` is called by the supervisor and the scorer before they fork; `confine` by the test harness before the program
starts, and by every fork of the scorer. Nothing here imports nalora: the files of this folder run in a bare
interpreter, which starts in 40 ms instead of the seconds that importing torch takes.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import struct
import sys
from typing import Any

Limits = dict[str, int]
Settings = dict[str, Any]

_NEWNS, _NEWUTS, _NEWIPC = 0x00020000, 0x04000000, 0x08000000
_NEWUSER, _NEWPID, _NEWNET = 0x10000000, 0x20000000, 0x40000000
_ANY_NAMESPACE = 0x7E020000
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
_MNT_DETACH = 2
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
# mount_setattr(2), Linux 5.12, has the same number on every architecture; it makes a tree of mounts read-only.
_SYS_MOUNT_SETATTR, _AT_RECURSIVE, _ATTR_RDONLY, _ATTR_NOSUID, _ATTR_NODEV = 442, 0x8000, 1, 2, 4
_DEVICES = ("null", "zero", "random", "urandom")
# The new root is mounted over /proc: every Linux has this folder, the program needs nothing from it, and without
# a /proc of its own the program cannot inspect other processes at all.
_NEW_ROOT = "/proc"

# By architecture: its number in the filter, and the index of its system call numbers in the tables below.
_ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
# Numbers from Linux 6.6: arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h; -1: none.
# These three are allowed or refused depending on their first argument.
_CLONE, _SOCKETPAIR, _PRLIMIT64 = (56, 220), (53, 199), (302, 261)
# Calls that would hold memory outside all limits (memfd, System V, inotify, large socket buffers, descriptors sent
# through sockets), reach what no namespace isolates (a socket of the family AF_VSOCK reaches the host of a virtual
# machine), make new namespaces and mounts with new rights, or read other processes.
_REFUSED = """
ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271, shmget 29 194, semget 64 190, msgget 68 186,
mq_open 240 180, memfd_create 319 279, mount 165 40, umount2 166 39, pivot_root 155 41, chroot 161 51, unshare 272 97,
setns 308 268, bpf 321 280, perf_event_open 298 241, userfaultfd 323 282, add_key 248 217, request_key 249 218,
keyctl 250 219, socket 41 198, sendmsg 46 211, setsockopt 54 208, sendmmsg 307 269, inotify_init 253 -1,
inotify_init1 294 26, fanotify_init 300 262, io_uring_setup 425 425, open_tree 428 428, move_mount 429 429,
fsopen 430 430, fsmount 432 432, mount_setattr 442 442, memfd_secret 447 447
"""
_CLONE3 = 435
_AF_UNIX = 1

_libc: Any = ctypes.CDLL(None, use_errno=True)


def enter() -> Settings:
    """Isolate this process as the JSON in the last command-line argument specifies, and return those settings.

    The backends "root" and "user" make new namespaces and a root of read-only files with one writable folder; the
    others need nothing here. Afterwards no process, even of the same user, can trace this one or read its memory.
    An OSError names the step that the system refuses.
    """
    # The first process of a namespace gets only the signals it has a handler for, and Python installs one for SIGINT.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    settings: Settings = json.loads(sys.argv[-1])
    if settings["backend"] in ("root", "user"):
        _unshare(in_user_namespace=settings["backend"] == "user")
        _build_root(settings["limits"], settings["view"])
    hide_memory()
    return settings


def _unshare(in_user_namespace: bool) -> None:
    uid, gid = os.geteuid(), os.getegid()
    _call("unshare", _NEWNS | _NEWUTS | _NEWIPC | _NEWPID | _NEWNET | (_NEWUSER if in_user_namespace else 0))
    if in_user_namespace:
        # Not mapped to user 0, which would get its capabilities back with an exec.
        for file, text in (("setgroups", "deny"), ("uid_map", f"1000 {uid} 1"), ("gid_map", f"1000 {gid} 1")):
            with open(f"/proc/self/{file}", "w") as map_file:
                map_file.write(text)


def _build_root(limits: Limits, view: dict[str, Any]) -> None:
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    _mount("tmpfs", _NEW_ROOT, "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=755,size=1m")
    os.umask(0o022)
    writable = _NEW_ROOT + view["folder"]
    for path in (writable, *(f"{_NEW_ROOT}/{name}" for name in ("proc", "dev", "empty"))):
        os.makedirs(path)
    for path in (*(f"{_NEW_ROOT}/dev/{device}" for device in _DEVICES), f"{_NEW_ROOT}/empty-file"):
        _touch(path)
    for source, path in view["visible"]:
        path = _NEW_ROOT + path
        os.makedirs(path if os.path.isdir(source) else os.path.dirname(path), exist_ok=True)
        if not os.path.isdir(source):
            _touch(path)
        _mount(source, path, None, _MS_BIND | _MS_REC)
    for path in view["hidden"]:
        empty = "empty" if os.path.isdir(_NEW_ROOT + path) else "empty-file"
        _mount(f"{_NEW_ROOT}/{empty}", _NEW_ROOT + path, None, _MS_BIND)
    attributes = struct.pack("QQQQ", _ATTR_RDONLY | _ATTR_NOSUID | _ATTR_NODEV, 0, 0, 0)
    arguments = (_SYS_MOUNT_SETATTR, -1, _NEW_ROOT.encode(), _AT_RECURSIVE, attributes, 32)
    _call("syscall", *arguments, step="mount_setattr")
    for device in _DEVICES:
        _mount(f"/dev/{device}", f"{_NEW_ROOT}/dev/{device}", None, _MS_BIND)
    options = f"mode=1777,size={limits['disk_bytes']},nr_inodes={limits['files']}"
    _mount("tmpfs", writable, "tmpfs", _MS_NOSUID | _MS_NODEV, options)
    os.chdir(_NEW_ROOT)
    # Mounts the old root over the new one, and then unmounts it.
    _call("pivot_root", b".", b".")
    _call("umount2", b".", _MNT_DETACH)
    os.chdir(view["folder"])


def confine(backend: str, limits: Limits) -> None:
    """Give up every right that neither the caller nor its children need; irreversible, and inherited by children."""
    if backend == "root":
        # A different user for every run: the limit on processes counts per user, and does not apply to user 0.
        user = 0x60000000 + int.from_bytes(os.urandom(3), "big")
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    # The limit counts the program, the test harness, in a user namespace the supervisor, and without a namespace or
    # a separate user everything that this user runs.
    processes = limits["processes"] + {"root": 1, "unsafe": _running_processes()}.get(backend, 2)
    memory, cpu, disk = (limits[name] for name in ("memory_bytes", "cpu_seconds", "disk_bytes"))
    values = {"AS": memory, "CPU": cpu, "FSIZE": disk, "NPROC": processes, "NOFILE": 64, "CORE": 0, "MSGQUEUE": 0}
    for name, value in values.items():
        _limit(name, value)
    if backend == "unsafe":
        return
    # Version 3 of the capability sets, all of them empty.
    _call("capset", struct.pack("Ii", 0x20080522, 0), bytes(24))
    _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _filter_system_calls()


def hide_memory() -> None:
    """Make this process untraceable and its memory unreadable, except for a user with rights over all processes."""
    if sys.platform == "linux":
        _call("prctl", _PR_SET_DUMPABLE, 0, 0, 0, 0)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies; has to be called again after a change of user."""
    if sys.platform == "linux":
        _call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def stop(child: int, backend: str) -> None:
    """Kill a child, everything it started and every other process of our namespace; wait until all have ended."""
    if backend == "unsafe":
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)
    os.kill(child, signal.SIGKILL)
    # From the first process of a namespace -1 means every other process in it; otherwise all processes of the user.
    if backend != "unsafe" and os.getpid() == 1:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


def _limit(name: str, value: int) -> None:
    limit = getattr(resource, f"RLIMIT_{name}", None)
    if limit is None:
        return
    hard = resource.getrlimit(limit)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    # One more second of CPU time for SIGXCPU, which identifies the cause, to arrive before SIGKILL.
    resource.setrlimit(limit, (value, value + 1 if name == "CPU" and hard != value else value))


def _running_processes() -> int:
    """Return how many processes and threads the machine runs; 0 if unknown, which lets no further one start."""
    try:
        with open("/proc/loadavg") as file:
            return int(file.read().split("/")[1].split()[0])
    except OSError:
        return 0


def _filter_system_calls() -> None:
    machine = os.uname().machine
    if machine not in _ARCHITECTURES:
        raise OSError(f"no system call filter for {machine}")
    architecture, index = _ARCHITECTURES[machine]
    refused = [int(call.split()[1 + index]) for call in _REFUSED.split(",")]
    load, equal, at_least, any_bit, answer = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, kill, not_permitted, not_implemented = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
    # Each test is followed by the answer if it is true, and jumps over that answer if it is false.
    steps = [(load, 0, 0, 4), (equal, 1, 0, architecture), (answer, 0, 0, kill), (load, 0, 0, 0)]
    # Numbers from 2^30 on are the 32-bit calls of x86_64.
    steps += [(at_least, 0, 1, 1 << 30), (answer, 0, 0, not_permitted)]
    for number in refused:
        if number >= 0:
            steps += [(equal, 0, 1, number), (answer, 0, 0, not_permitted)]
    # The arguments of clone3 are in memory, which no filter can read; the C library falls back to clone.
    steps += [(equal, 0, 1, _CLONE3), (answer, 0, 0, not_implemented)]
    # Only pairs of local sockets, which asyncio needs, and only a process's own limits: the program could otherwise
    # mislead a test harness that runs out of memory.
    for number, argument in ((_SOCKETPAIR[index], _AF_UNIX), (_PRLIMIT64[index], 0)):
        steps += [(equal, 0, 4, number), (load, 0, 0, 16), (equal, 0, 1, argument)]
        steps += [(answer, 0, 0, allow), (answer, 0, 0, not_permitted)]
    steps += [(equal, 0, 3, _CLONE[index]), (load, 0, 0, 16), (any_bit, 0, 1, _ANY_NAMESPACE)]
    steps += [(answer, 0, 0, not_permitted), (answer, 0, 0, allow)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(struct.pack("HP", len(steps), ctypes.addressof(code)))
    _call("prctl", _PR_SET_SECCOMP, 2, ctypes.c_void_p(ctypes.addressof(program)), 0, 0)


def _touch(file: str) -> None:
    os.close(os.open(file, os.O_CREAT | os.O_WRONLY, 0o644))


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str = "") -> None:
    texts = [None if text is None else text.encode() for text in (source, target, kind)]
    _call("mount", *texts, flags, options.encode(), step=f"mount {target}")


def _call(name: str, *arguments: Any, step: str = "") -> None:
    wide = [ctypes.c_ulong(value) if isinstance(value, int) else value for value in arguments]
    if getattr(_libc, name)(*wide) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{step or name}: {os.strerror(number)}")
