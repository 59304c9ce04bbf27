"""Methods, tasks and activations by name: entries of nalora's packages, or of a Python file given by its path."""

from __future__ import annotations

import functools
import importlib.util
import os
import pkgutil
import re
import sys
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from nalora.errors import NALoRAError, missing_path, unknown_name

_FILE = re.compile(r"(?P<file>.+\.py)(:(?P<entry>[^:/\\]+))?", re.DOTALL)


def scan(package: str, folders: Iterable[str], table: str) -> dict[str, Any]:
    """Return by name the entries of the tuple `table` (METHODS or TASKS) in every module of a package."""
    modules = [import_module(f"{package}.{module.name}") for module in pkgutil.iter_modules(folders)]
    return {entry.name: entry for module in modules for entry in getattr(module, table, ())}


def split(text: Any) -> tuple[str, str | None] | None:
    """Return (file, entry) of ``file.py`` or ``file.py:entry``, None for anything else."""
    match = _FILE.fullmatch(text) if isinstance(text, str) else None
    return (match["file"], match["entry"]) if match else None


def entry(kind: str, text: str, table: str) -> Any:
    """Return the entry of a file's `table` that ``file.py:entry`` names, or the first entry for ``file.py``.

    Raises:
        NALoRAError: no such file, no table in it, or no entry of that name; `kind` is the word for an entry.
    """
    file, name = split(text) or (text, None)
    where = f"{kind} {text!r}"
    if not os.path.isfile(file):
        raise missing_path("file", where, f"a {kind}'s Python file")
    entries = {item.name: item for item in getattr(load(Path(file)), table, ())}
    if not entries:
        expected = f"{table} = (Your{kind.title()},)"
        raise NALoRAError(where, found=f"no {table} in the file", expected=expected, fix="add that line")
    first = next(iter(entries))
    if name is not None and name not in entries:
        raise unknown_name(where, f"no {kind} {name!r} in the file", name, entries, f"write {file}:{first}")
    return entries[name or first]


def load(file: Path) -> ModuleType:
    """Run an existing ``.py`` file as a module, again after it has changed; its exceptions are not caught."""
    state = file.stat()
    return _load(file.resolve(), state.st_mtime_ns, state.st_size)


@functools.cache
def _load(file: Path, *_state: int) -> ModuleType:
    # A module name that no import statement can contain; dataclasses look up their module's names under it.
    spec = importlib.util.spec_from_file_location(str(file), file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
