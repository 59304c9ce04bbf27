"""Python files that a user names by their path: a method, an activation."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType


def load(file: Path) -> ModuleType:
    """Run an existing ``.py`` file as a module of its own, which nobody else can import; what it raises is raised."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
