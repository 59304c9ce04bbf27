"""Run a program that a model wrote, isolated, against unit tests whose result it cannot forge.

Every program runs in a new process without network, environment variables, home folder or other processes, on
read-only files with one temporary folder, with limits on memory, time, processes, disk and output. The isolation
backend is the first that works here: namespaces ("root", or "user" through a user namespace), then "bubblewrap".
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nalora.errors import NALoRAError, require
from nalora.files.atomic import json_text
from nalora.tasks import sandbox_view

_SANDBOXED = Path(__file__).parent / "sandboxed"
# Imports the folder as a separate package: importing it as a part of nalora would import torch, and with its parent
# folder on the path, `code.py` and other modules would hide those of the standard library.
_START = (
    "import sys, types; sys.path.remove(''); package = sys.modules['sandboxed'] = types.ModuleType('sandboxed'); "
    "package.__path__ = [sys.argv[1]]; from sandboxed.{module} import main; main()"
)
# Where bubblewrap mounts that folder: its own path may be below the program's writable folder.
_SANDBOXED_IN_BUBBLEWRAP = "/sandboxed"
# The supervisor enforces the time limit; this margin covers a machine too busy to schedule it.
_GRACE_SECONDS = 30


@dataclass(frozen=True)
class Limits:
    """Limits on what a program may use; a limit below 1 raises a NALoRAError."""

    memory_bytes: int = 512 << 20  # address space per process, so `processes` times this plus the disk in total
    cpu_seconds: int = 5  # per process
    wall_seconds: int = 10  # from the start of the program to the end of its tests
    processes: int = 8  # processes and threads at the same time, the program included
    disk_bytes: int = 32 << 20  # size of the temporary folder, which is kept in memory
    files: int = 1024  # number of files in that folder; not enforced by bubblewrap
    output_bytes: int = 1 << 20  # printed output, of which the end is kept

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            require(value >= 1, f"Limits.{name}", value, "at least 1", f"leave {name} at its default")


@dataclass(frozen=True)
class Outcome:
    """Result of one run."""

    passed: bool  # the program loaded and every test passed; nothing the program does can forge this
    timed_out: bool  # it was stopped after `Limits.wall_seconds`
    reason: str  # "passed", or why it did not pass
    output: str  # the last 4,096 bytes it printed


def run(
    program: str,
    tests: str = "",
    *,
    entries: Sequence[str] = (),
    prelude: str = "",
    limits: Limits | None = None,
    unsafe: bool = False,
) -> Outcome:
    """Run a program and then tests of its functions; thread-safe.

    The program is imported as a module named ``program`` and can use the standard library alone. The tests run in a
    process that it cannot access. Arguments and return values are exchanged as plain data (numbers, strings, lists,
    tuples, sets, dicts and similar types); any other object of the program can be called, iterated and passed back,
    but compares unequal to everything else.

    Args:
        program: untrusted Python source.
        tests: Python source that raises when the program is wrong; trusted, but run in the sandbox too.
        entries: names of the program's functions and classes that the tests use.
        prelude: trusted source with the imports and helpers of the tests, run before them.
        limits: what the program may use.
        unsafe: run without isolation: limits only, and only the processes of the program's group are killed.

    Raises:
        NALoRAError: this machine cannot isolate programs.
    """
    return _launch("unsafe" if unsafe else check(), program, tests, entries, prelude, limits or Limits())


@functools.cache
def check() -> str:
    """Return the first isolation backend in which a probe program finds no hole; raise a NALoRAError without one."""
    faults = []
    for backend in _backends():
        fault = _fault(backend)
        if fault is None:
            return backend
        faults.append(f"{backend}: {fault}")
    raise NALoRAError(
        "sandbox for generated programs",
        found="; ".join(faults) or f"no way to isolate a process on {sys.platform}",
        expected="Linux 5.14 or newer with user namespaces, root with all capabilities, or bubblewrap",
        fix="apt install bubblewrap, or allow user namespaces (sysctl kernel.unprivileged_userns_clone=1 "
        "kernel.apparmor_restrict_unprivileged_userns=0; in Docker --privileged), or use --unsafe-code "
        "if these programs may do anything that you may do",
    )


def _backends() -> list[str]:
    if sys.platform != "linux":
        return []
    root = os.geteuid() == 0 and Path("/proc/self/uid_map").read_text().split() == ["0", "0", str(2**32 - 1)]
    return [*(["root"] if root else []), "user", *(["bubblewrap"] if shutil.which("bwrap") else [])]


_PROBE = """
import os, socket, time
def report_if_possible(hole, function, *arguments, **options):
    try:
        function(*arguments, **options)
        print(hole)
    except OSError:
        pass
def start_processes():
    for _ in range(PROCESSES + 1):
        if os.fork() == 0:
            time.sleep(60)
report_if_possible("it reaches the network", socket.create_connection, ("127.0.0.1", PORT), timeout=1)
report_if_possible("it can create sockets", socket.socket, socket.AF_UNIX)
for folder in ("/", "/usr", "/dev", "/etc", PREFIX):
    report_if_possible(f"it can write to {folder}", open, os.path.join(folder, ".nalora-probe"), "x")
if os.path.exists(FILE):
    print("it sees files of this machine")
for folder, names, files in os.walk(os.path.dirname(os.__file__)):
    if os.path.basename(folder) in ("site-packages", "dist-packages") and (names or files):
        print(f"it sees the packages in {folder}")
open("file", "w").write("this folder is writable")
if os.environ:
    print(f"it sees the environment variables {list(os.environ)}")
report_if_possible(f"it can start more than {PROCESSES} processes", start_processes)
"""


def _fault(backend: str) -> str | None:
    """Return why a backend cannot be used (it does not start, or the probe found a hole), or None."""
    limits = Limits()
    with socket.create_server(("127.0.0.1", 0)) as server, tempfile.NamedTemporaryFile() as file:
        port = server.getsockname()[1]
        constants = {"PORT": port, "PREFIX": sys.base_prefix, "FILE": file.name, "PROCESSES": limits.processes}
        program = "".join(f"{name} = {value!r}\n" for name, value in constants.items()) + _PROBE
        try:
            outcome = _launch(backend, program, "", (), "", limits)
        except NALoRAError as error:
            return error.found
    return (outcome.output.strip() or None) if outcome.passed else outcome.reason


def _launch(backend: str, program: str, tests: str, entries: Sequence[str], prelude: str, limits: Limits) -> Outcome:
    job = {"program": program, "tests": tests, "entries": list(entries), "prelude": prelude}
    # In a namespace the temporary folder is a separate file system that ends with the namespace.
    unsafe_folder = tempfile.TemporaryDirectory(prefix="nalora-") if backend == "unsafe" else contextlib.nullcontext("")
    with unsafe_folder as folder:
        seconds = limits.wall_seconds + _GRACE_SECONDS
        try:
            # With a fixed hash seed, a program that depends on the order of a set always gets the same verdict.
            result = subprocess.run(
                command(backend, "harness", folder, limits),
                input=json_text(job).encode(),
                capture_output=True,
                env={"PYTHONHASHSEED": "0"},
                cwd="/",
                start_new_session=True,
                timeout=seconds,
            )
        except subprocess.TimeoutExpired:
            return Outcome(False, True, f"timed out: no result after {seconds} s", "")
    try:
        fields: dict[str, Any] = json.loads(result.stdout)
    except ValueError:
        lines = result.stderr.decode(errors="replace").strip().splitlines()
        fields = {"setup": lines[-1] if lines else f"exit code {result.returncode}"}
    if "setup" in fields:
        expected = "a supervisor that starts and isolates the program"
        raise start_error("sandbox for generated programs", fields["setup"], expected)
    return Outcome(**fields)


def command(backend: str, module: str, folder: str, limits: Limits, packages: Sequence[str] = ()) -> list[str]:
    """Return the command that starts a module of `nalora.tasks.sandboxed`, which then isolates itself.

    The backend "unsafe" applies limits alone, and writes to `folder`; the others choose their own folder. The process
    can import these packages and everything they require, besides the standard library.
    """
    isolated = backend != "unsafe"
    view = sandbox_view.view(tuple(packages)) if isolated else sandbox_view.View((), (), folder)
    paths = [sandbox_view.PACKAGES] if isolated else [str(path.parent) for path in sandbox_view.package_files(packages)]
    paths = list(dict.fromkeys(paths)) if packages else []
    settings = {"backend": backend, "limits": asdict(limits), "view": view._asdict(), "packages": paths}
    sandboxed = _SANDBOXED_IN_BUBBLEWRAP if backend == "bubblewrap" else str(_SANDBOXED)
    # -S: no installed packages except the ones in `packages`.
    start = [sandbox_view.interpreter(), "-s", "-S", "-c", _START.format(module=module), sandboxed, json_text(settings)]
    if backend != "bubblewrap":
        return start
    return [*sandbox_view.bubblewrap(view, limits.disk_bytes, _SANDBOXED, sandboxed), *start]


def start_error(where: str, found: str, expected: str) -> NALoRAError:
    """Return the error for a sandboxed process that does not start."""
    fix = "call nalora.tasks.sandbox.check(), which reports what this machine lacks"
    return NALoRAError(where, found=found, expected=expected, fix=fix)
