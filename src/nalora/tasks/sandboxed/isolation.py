"""Taking rights away from this process with what Linux gives: namespaces, mounts, limits, a system call filter.

`enter` is for the supervisor, before it forks; `confine` for the judge, before the program exists. Nothing here imports
nalora: the files of this folder run in a bare interpreter, which starts in 40 ms and not in the seconds of torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import struct
import sys
from typing import Any

Limits = dict[str, int]
View = dict[str, Any]

_NEWNS, _NEWUTS, _NEWIPC = 0x00020000, 0x04000000, 0x08000000
_NEWUSER, _NEWPID, _NEWNET = 0x10000000, 0x20000000, 0x40000000
_ANY_NAMESPACE = 0x7E020000
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
_MNT_DETACH = 2
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
# mount_setattr(2), Linux 5.12, the same number on every architecture: makes a whole tree of mounts read-only.
_SYS_MOUNT_SETATTR, _AT_RECURSIVE, _ATTR_RDONLY, _ATTR_NOSUID, _ATTR_NODEV = 442, 0x8000, 1, 2, 4
_DEVICES = ("null", "zero", "random", "urandom")
# The new root grows over this folder: every Linux has it, nothing that the program needs lies in it, and without
# a /proc of its own the program cannot look at other processes at all.
_NEW_ROOT = "/proc"

# By architecture: its number in the filter, and the place of its system calls' numbers in the tables below.
_ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
# Numbers from Linux 6.6: arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h; -1: not there.
# These depend on their arguments.
_CLONE, _SOCKETPAIR, _PRLIMIT64 = (56, 220), (53, 199), (302, 261)
# What would hold memory outside all limits (memfd, System V, inotify, large socket buffers, descriptors sent through
# sockets), reach what no namespace isolates (a socket of the family AF_VSOCK leads to the host of a virtual machine),
# make new namespaces and mounts with fresh rights, or look into other processes.
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


def enter(way: str, limits: Limits, view: View) -> None:
    """New namespaces for this process and its children, and a root of read-only files with one writable folder.

    Args:
        way: "root" when this is the real root, else "user", which makes a user namespace to have the right; the
            other ways need nothing here.
        limits: the fields of `nalora.tasks.sandbox.Limits`.
        view: the fields of `nalora.tasks.sandbox_view.View`.

    Raises:
        OSError: the system refuses one of the steps; the text names it.
    """
    if way not in ("root", "user"):
        return
    flags = _NEWNS | _NEWUTS | _NEWIPC | _NEWPID | _NEWNET
    uid, gid = os.geteuid(), os.getegid()
    _call("unshare", flags | (_NEWUSER if way == "user" else 0))
    if way == "user":
        # Not mapped to 0: an exec by user 0 of the namespace would get its capabilities back.
        for file, text in (("setgroups", "deny"), ("uid_map", f"1000 {uid} 1"), ("gid_map", f"1000 {gid} 1")):
            with open(f"/proc/self/{file}", "w") as map_file:
                map_file.write(text)
    _build_root(limits, view)


def _build_root(limits: Limits, view: View) -> None:
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    _mount("tmpfs", _NEW_ROOT, "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=755,size=1m")
    os.umask(0o022)
    folder = _NEW_ROOT + view["folder"]
    for place in (folder, *(f"{_NEW_ROOT}/{name}" for name in ("proc", "dev", "empty"))):
        os.makedirs(place)
    for file in (*(f"{_NEW_ROOT}/dev/{device}" for device in _DEVICES), f"{_NEW_ROOT}/empty-file"):
        _touch(file)
    for source, place in view["shown"]:
        _show(source, _NEW_ROOT + place)
    for place in view["hidden"]:
        empty = "empty" if os.path.isdir(_NEW_ROOT + place) else "empty-file"
        _mount(f"{_NEW_ROOT}/{empty}", _NEW_ROOT + place, None, _MS_BIND)
    attributes = struct.pack("QQQQ", _ATTR_RDONLY | _ATTR_NOSUID | _ATTR_NODEV, 0, 0, 0)
    _system_call(_SYS_MOUNT_SETATTR, "mount_setattr", -1, _NEW_ROOT.encode(), _AT_RECURSIVE, attributes, 32)
    for device in _DEVICES:
        _mount(f"/dev/{device}", f"{_NEW_ROOT}/dev/{device}", None, _MS_BIND)
    options = f"mode=1777,size={limits['disk_bytes']},nr_inodes={limits['files']}"
    _mount("tmpfs", folder, "tmpfs", _MS_NOSUID | _MS_NODEV, options)
    os.chdir(_NEW_ROOT)
    # Old and new root on the same place; then the old one, which lies on top, is taken off.
    _call("pivot_root", b".", b".")
    _call("umount2", b".", _MNT_DETACH)
    os.chdir(view["folder"])


def _show(source: str, place: str) -> None:
    if os.path.isdir(source):
        os.makedirs(place, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(place), exist_ok=True)
        _touch(place)
    _mount(source, place, None, _MS_BIND | _MS_REC)


def confine(way: str, limits: Limits) -> None:
    """Give up every right that neither the judge nor the program needs; irreversible, and inherited by children.

    Raises:
        OSError: the system refuses one of the steps; the text names it.
    """
    if way == "root":
        # A user of its own for every run: the limit on processes counts by user, and is not held for user 0 at all.
        nobody = 0x60000000 + int.from_bytes(os.urandom(3), "big")
        os.setgroups([])
        os.setresgid(nobody, nobody, nobody)
        os.setresuid(nobody, nobody, nobody)
    # The program is one of its processes; the judge, and in a user namespace the supervisor, count too. Without
    # a namespace or a user of its own, so does everything that this user runs.
    processes = limits["processes"] + (1 if way == "root" else 2 if way != "unsafe" else _running())
    memory, cpu, disk = (limits[name] for name in ("memory_bytes", "cpu_seconds", "disk_bytes"))
    most = {"AS": memory, "CPU": cpu, "FSIZE": disk, "NPROC": processes, "NOFILE": 64, "CORE": 0, "MSGQUEUE": 0}
    for name, value in most.items():
        _limit(name, value)
    if way == "unsafe":
        return
    # Version 3 of the capability sets, which are all empty.
    _call("capset", struct.pack("Ii", 0x20080522, 0), bytes(24))
    _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _filter_system_calls()


def hide_memory() -> None:
    """Nobody without the right over all processes may trace this one or read its memory, even as the same user."""
    if sys.platform == "linux":
        _call("prctl", _PR_SET_DUMPABLE, 0, 0, 0, 0)


def die_with_parent() -> None:
    """The kernel kills this process when its parent dies; to be asked for again after a change of user."""
    if sys.platform == "linux":
        _call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def stop(child: int, way: str) -> None:
    """Kill a child, everything that it started and everyone else in our namespace; wait until all of it is gone."""
    if way == "unsafe":
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)
    os.kill(child, signal.SIGKILL)
    # For the first process of a namespace -1 means everyone else in it; for any other it would mean all of the user's.
    if way != "unsafe" and os.getpid() == 1:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


def _limit(name: str, value: int) -> None:
    which = getattr(resource, f"RLIMIT_{name}", None)
    if which is None:
        return
    hard = resource.getrlimit(which)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    # One second of CPU time more, for the signal that tells it from other ends to come before the one that kills.
    resource.setrlimit(which, (value, value + 1 if name == "CPU" and hard != value else value))


def _running() -> int:
    """How many processes and threads the machine runs; 0 where it does not say, which lets no further one start."""
    try:
        with open("/proc/loadavg") as file:
            return int(file.read().split("/")[1].split()[0])
    except OSError:
        return 0


def _filter_system_calls() -> None:
    machine = os.uname().machine
    if machine not in _ARCHITECTURES:
        raise OSError(f"no system call filter for {machine}")
    architecture, place = _ARCHITECTURES[machine]
    refused = [int(call.split()[1 + place]) for call in _REFUSED.split(",")]
    load, equal, above, any_bit, give = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, kill, not_permitted, not_there = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
    # Each test is followed by the answer for when it holds, and jumps over that one when it does not.
    steps = [(load, 0, 0, 4), (equal, 1, 0, architecture), (give, 0, 0, kill), (load, 0, 0, 0)]
    # Numbers from 2^30 on are the 32-bit calls of x86_64.
    steps += [(above, 0, 1, 1 << 30), (give, 0, 0, not_permitted)]
    for number in (each for each in refused if each >= 0):
        steps += [(equal, 0, 1, number), (give, 0, 0, not_permitted)]
    # The arguments of clone3 lie in memory, where no filter can look; the C library falls back to clone.
    steps += [(equal, 0, 1, _CLONE3), (give, 0, 0, not_there)]
    # Pairs of local sockets, which asyncio needs, and the own limits alone: a judge without memory could be misled.
    for number, argument in ((_SOCKETPAIR[place], _AF_UNIX), (_PRLIMIT64[place], 0)):
        steps += [(equal, 0, 4, number), (load, 0, 0, 16), (equal, 0, 1, argument)]
        steps += [(give, 0, 0, allow), (give, 0, 0, not_permitted)]
    steps += [
        (equal, 0, 3, _CLONE[place]),
        (load, 0, 0, 16),
        (any_bit, 0, 1, _ANY_NAMESPACE),
        (give, 0, 0, not_permitted),
    ]
    steps += [(give, 0, 0, allow)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(struct.pack("HP", len(steps), ctypes.addressof(code)))
    _call("prctl", _PR_SET_SECCOMP, 2, ctypes.c_void_p(ctypes.addressof(program)), 0, 0)


def _touch(file: str) -> None:
    os.close(os.open(file, os.O_CREAT | os.O_WRONLY, 0o644))


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str = "") -> None:
    texts = [None if text is None else text.encode() for text in (source, target, kind)]
    _call("mount", *texts, flags, options.encode(), about=target)


def _call(name: str, *arguments: Any, about: str = "") -> None:
    wide = [ctypes.c_ulong(each) if isinstance(each, int) else each for each in arguments]
    _check(getattr(_libc, name)(*wide), f"{name} {about}".strip())


def _system_call(number: int, name: str, *arguments: Any) -> None:
    wide = [ctypes.c_long(each) if isinstance(each, int) else each for each in (number, *arguments)]
    _check(_libc.syscall(*wide), name)


def _check(result: int, step: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{step}: {os.strerror(number)}")
