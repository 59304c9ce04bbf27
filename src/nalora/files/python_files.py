"""What is chosen by name: an entry of a package of ours, or of a Python file that a user names by its path."""

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
    """By name, every entry of the tuples that a package's modules call METHODS, or TASKS."""
    modules = [import_module(f"{package}.{module.name}") for module in pkgutil.iter_modules(folders)]
    return {entry.name: entry for module in modules for entry in getattr(module, table, ())}


def split(text: Any) -> tuple[str, str | None] | None:
    """(file, entry) of ``file.py`` or ``file.py:entry``; None of everything else."""
    match = _FILE.fullmatch(text) if isinstance(text, str) else None
    return (match["file"], match["entry"]) if match else None


def entry(kind: str, text: str, table: str) -> Any:
    """The entry of a file's table that ``file.py:entry`` names, or the first.

    Args:
        kind: what an entry is, in words.
        text: as `split` takes it.
        table: the name of the tuple in the file.

    Raises:
        NALoRAError: no such file, no table in it, or no entry of that name.
    """
    file, name = split(text) or (text, None)
    where = f"{kind} {text!r}"
    if not os.path.isfile(file):
        raise missing_path("file", where, f"a {kind}'s Python file")
    entries = {each.name: each for each in getattr(load(Path(file)), table, ())}
    if not entries:
        expected = f"{table} = (Your{kind.title()},)"
        raise NALoRAError(where, found=f"no {table} in the file", expected=expected, fix="add that line")
    if name is not None and name not in entries:
        raise unknown_name(
            where, f"no {kind} {name!r} in the file", name, entries, f"write {file}:{next(iter(entries))}"
        )
    return entries[name] if name is not None else next(iter(entries.values()))


def load(file: Path) -> ModuleType:
    """Run an existing ``.py`` file as a module of its own, again when it has changed; what it raises is raised."""
    state = file.stat()
    return _load(file.resolve(), state.st_mtime_ns, state.st_size)


@functools.cache
def _load(file: Path, *_state: int) -> ModuleType:
    # Under a name that no import can spell; dataclasses look up their module's names there.
    spec = importlib.util.spec_from_file_location(str(file), file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
