"""Running a program that a model wrote, so that it can harm nobody and cannot claim to have passed its tests.

Each program gets a process of its own without network, environment, home or foreign processes, on read-only folders
with one temporary one, with limits on memory, time, processes, disk and output. What does the isolating is chosen
from what the machine allows: namespaces made directly (by root, or through a user namespace), else by bubblewrap.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nalora.errors import NALoRAError, require
from nalora.files.atomic import json_text
from nalora.tasks import sandbox_view

_WHERE = "sandbox for generated programs"
_FOLDER = Path(__file__).parent / "sandboxed"
# The folder as a package of its own: as a part of nalora its import would bring torch, and with its parent folder on
# the path, `code.py` and the like would hide modules of the standard library.
_START = (
    "import sys, types; sys.path.remove(''); package = sys.modules['sandboxed'] = types.ModuleType('sandboxed'); "
    "package.__path__ = [sys.argv[1]]; from sandboxed.{module} import main; main()"
)
# Where bubblewrap shows that folder: not in its own place, which may lie in the program's writable folder.
_CODE_PLACE = "/sandboxed"
# The supervisor keeps the time itself; this is for a machine so busy that it does not get to.
_GRACE_SECONDS = 30


@dataclass(frozen=True)
class Limits:
    """What a program may use.

    Args:
        memory_bytes: address space of each process; all together use at most `processes` times that, plus the disk.
        cpu_seconds: CPU time of each process.
        wall_seconds: time from the start of the program to the end of its tests.
        processes: processes and threads at the same time, the program among them.
        disk_bytes: size of the temporary folder, which is kept in memory.
        files: how many files it holds; bubblewrap does not count them.
        output_bytes: what may be printed; the tail of it is kept.

    Raises:
        NALoRAError: a limit below 1.
    """

    memory_bytes: int = 512 << 20
    cpu_seconds: int = 5
    wall_seconds: int = 10
    processes: int = 8
    disk_bytes: int = 32 << 20
    files: int = 1024
    output_bytes: int = 1 << 20

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            require(value >= 1, f"Limits.{name}", value, "at least 1", f"leave {name} at its default")


@dataclass(frozen=True)
class Outcome:
    """How a run went.

    Args:
        passed: the program loaded and every test held; nothing the program does can set it otherwise.
        timed_out: it was stopped after `Limits.wall_seconds`.
        reason: "passed", or why not, in words.
        output: the last 4,096 bytes it printed.
    """

    passed: bool
    timed_out: bool
    reason: str
    output: str


def run(
    program: str,
    tests: str = "",
    *,
    entries: Sequence[str] = (),
    prelude: str = "",
    limits: Limits | None = None,
    unsafe: bool = False,
) -> Outcome:
    """Run a program and then tests on its functions; safe to call from many threads at once.

    The program is a module named ``program`` under the standard library alone. The tests run in a process that the
    program cannot reach: each call of one of `entries` is answered by the program with plain data (numbers, texts,
    lists, tuples, sets, dicts and the like), and what is no plain data can be called, iterated and given back, but
    equals nothing else.

    Args:
        program: Python source, not trusted.
        tests: Python source, trusted as far as the sandbox: it raises when the program is wrong.
        entries: the program's functions and classes that the tests use.
        prelude: trusted source run before the tests: imports and helpers of theirs.
        limits: what the program may use.
        unsafe: without isolation: limits, and an end for the processes that stay in the program's group.

    Raises:
        NALoRAError: this machine cannot isolate programs, as `check` says.
    """
    way = "unsafe" if unsafe else check()
    return _launch(way, program, tests, entries, prelude, limits or Limits())


_chosen: list[str] = []
_choosing = threading.Lock()


def check() -> str:
    """The first way of isolating in which a program that looks for holes finds none; tried once for each process.

    Raises:
        NALoRAError: this machine cannot isolate programs.
    """
    with _choosing:
        if not _chosen:
            found = []
            for way in _ways():
                fault = _fault(way)
                if fault is None:
                    _chosen.append(way)
                    break
                found.append(f"{way}: {fault}")
            else:
                raise NALoRAError(
                    _WHERE,
                    found="; ".join(found) or f"no way to isolate a process on {sys.platform}",
                    expected="Linux 5.14 or newer with user namespaces, root with all capabilities, or bubblewrap",
                    fix="apt install bubblewrap, or allow user namespaces (sysctl kernel.unprivileged_userns_clone=1 "
                    "kernel.apparmor_restrict_unprivileged_userns=0; in Docker --privileged), or give --unsafe-code "
                    "if these programs may do anything you may",
                )
        return _chosen[0]


def _ways() -> list[str]:
    if sys.platform != "linux":
        return []
    root = os.geteuid() == 0 and Path("/proc/self/uid_map").read_text().split() == ["0", "0", str(2**32 - 1)]
    return [*(["root"] if root else []), "user", *(["bubblewrap"] if shutil.which("bwrap") else [])]


_PROBE = """
import os, socket, time
try:
    socket.create_connection(("127.0.0.1", PORT), timeout=1)
    print("it reaches the network")
except OSError:
    pass
for folder in ("/", "/usr", "/dev", "/etc", PREFIX):
    try:
        open(os.path.join(folder, ".nalora-probe"), "x")
        print(f"it can write to {folder}")
    except OSError:
        pass
if os.path.exists(FILE):
    print("it sees our files")
for folder, names, files in os.walk(os.path.dirname(os.__file__)):
    if os.path.basename(folder) in ("site-packages", "dist-packages") and (names or files):
        print(f"it sees the packages in {folder}")
try:
    socket.socket(socket.AF_UNIX)
    print("it can make sockets")
except OSError:
    pass
open("file", "w").write("it may write here")
if os.environ:
    print(f"it sees the environment: {list(os.environ)}")
started = 0
try:
    while started <= PROCESSES:
        if os.fork() == 0:
            time.sleep(60)
        started += 1
    print(f"it started more than {PROCESSES} processes")
except OSError:
    pass
"""


def _fault(way: str) -> str | None:
    """What is wrong with a way of isolating: it cannot be had, or the probe found a hole; None when nothing is."""
    limits = Limits()
    with socket.create_server(("127.0.0.1", 0)) as server, tempfile.NamedTemporaryFile() as file:
        port = server.getsockname()[1]
        facts = {"PORT": port, "PREFIX": sys.base_prefix, "FILE": file.name, "PROCESSES": limits.processes}
        program = "".join(f"{name} = {value!r}\n" for name, value in facts.items()) + _PROBE
        try:
            outcome = _launch(way, program, "", (), "", limits)
        except NALoRAError as error:
            return error.found
    return (outcome.output.strip() or None) if outcome.passed else outcome.reason


def _launch(way: str, program: str, tests: str, entries: Sequence[str], prelude: str, limits: Limits) -> Outcome:
    job = {"program": program, "tests": tests, "entries": list(entries), "prelude": prelude}
    # In a namespace the temporary folder is a file system of its own, and gone with it.
    unsafe_folder = tempfile.TemporaryDirectory(prefix="nalora-") if way == "unsafe" else contextlib.nullcontext("")
    with unsafe_folder as folder:
        try:
            # The seed: a program that depends on the order of a set gets one verdict, not two.
            ended = subprocess.run(
                command(way, "supervisor", folder, limits),
                input=json_text(job).encode(),
                capture_output=True,
                env={"PYTHONHASHSEED": "0"},
                cwd="/",
                start_new_session=True,
                timeout=limits.wall_seconds + _GRACE_SECONDS,
            )
        except subprocess.TimeoutExpired:
            return Outcome(False, True, f"timed out: no word after {limits.wall_seconds + _GRACE_SECONDS} s", "")
    return _outcome(ended)


def command(way: str, module: str, folder: str, limits: Limits, packages: Sequence[str] = ()) -> list[str]:
    """What starts a module of `nalora.tasks.sandboxed`, which isolates itself.

    Args:
        way: what `check` returns, or "unsafe": limits alone.
        module: its name.
        folder: where an unsafe one may write; an isolated one has its own.
        limits: what it may use.
        packages: importable packages that it may use, with all that they require.
    """
    seen = sandbox_view.view(tuple(packages)) if way != "unsafe" else sandbox_view.View((), (), folder)
    parents = dict.fromkeys(str(path.parent) for path in sandbox_view.package_files(packages))
    importable = [sandbox_view.PACKAGES] if way != "unsafe" else list(parents)
    settings = {"way": way, "limits": asdict(limits), "view": asdict(seen), "packages": importable if packages else []}
    code = _CODE_PLACE if way == "bubblewrap" else str(_FOLDER)
    # -S: no packages of ours, but those that are named.
    start = [sandbox_view.interpreter(), "-s", "-S", "-c", _START.format(module=module), code, json_text(settings)]
    if way != "bubblewrap":
        return start
    return [*sandbox_view.bubblewrap(seen, limits.disk_bytes, _FOLDER, _CODE_PLACE), *start]


def _outcome(ended: subprocess.CompletedProcess[bytes]) -> Outcome:
    try:
        fields: dict[str, Any] = json.loads(ended.stdout)
    except ValueError:
        text = ended.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {ended.returncode}"]
        fields = {"setup": text[-1]}
    if "setup" in fields:
        raise refusal(_WHERE, fields["setup"], "a supervisor that starts and isolates the program")
    return Outcome(**fields)


def refusal(where: str, found: str, expected: str) -> NALoRAError:
    """The error of a process that does not start."""
    fix = "call nalora.tasks.sandbox.check(), which says what this machine lacks"
    return NALoRAError(where, found=found, expected=expected, fix=fix)
