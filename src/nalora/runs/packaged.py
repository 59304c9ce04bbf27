"""Recipes and studies that come with nalora, found by name wherever it is installed.

Each file opens with the command that starts it, then a line `# In short: what it is | what it costs`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

RECIPES = Path(__file__).parent / "recipes"
STUDIES = RECIPES / "studies"
IN_SHORT = "# In short: "


class Opening(NamedTuple):
    """What a file says of itself in one line."""

    about: str
    cost: str


def recipes() -> dict[str, Path]:
    """The file of every recipe, by name."""
    return _by_name(RECIPES)


def studies() -> dict[str, Path]:
    """The file of every study, by name."""
    return _by_name(STUDIES)


def recipe(name: str | Path) -> Path:
    """The file of that path or, where there is none, the recipe of that name; else the path as it is."""
    return _found(Path(name), recipes())


def study(name: str | Path) -> Path:
    """The file of that path or, where there is none, the study of that name; else the path as it is."""
    return _found(Path(name), studies())


def opening(file: Path) -> Opening:
    """What the file is and what it costs."""
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith(IN_SHORT):
            about, _, cost = line.removeprefix(IN_SHORT).partition(" | ")
            return Opening(about.strip(), cost.strip())
    return Opening("", "")


def _by_name(folder: Path) -> dict[str, Path]:
    return {file.stem: file for file in sorted(folder.glob("*.yaml"))}


def _found(path: Path, known: Mapping[str, Path]) -> Path:
    """A user's own file goes before ours of the same name."""
    try:
        own = path.is_file()
    except (OSError, ValueError):  # a name that is too long, or one with a NUL byte: no file has it
        own = False
    return path if own else known.get(str(path), path)
