"""Recipes, studies and data that come with nalora, found by name wherever it is installed.

Each file begins with the command that starts it, then a line `# In short: description | cost`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

RECIPES = Path(__file__).parent / "recipes"
STUDIES = RECIPES / "studies"
IN_SHORT = "# In short: "


def recipes() -> dict[str, Path]:
    """Return the file of every recipe, by name."""
    return _by_name(RECIPES)


def studies() -> dict[str, Path]:
    """Return the file of every study, by name."""
    return _by_name(STUDIES)


def _by_name(folder: Path) -> dict[str, Path]:
    return dict(sorted((file.stem, file) for file in folder.glob("*.yaml")))


def summary(file: Path) -> tuple[str, str]:
    """Return the file's description and its cost."""
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith(IN_SHORT):
            description, _, cost = line.removeprefix(IN_SHORT).partition(" | ")
            return description.strip(), cost.strip()
    return "", ""


def find(name: str | Path, named: Mapping[str, Path]) -> Path:
    """Return the path if it is a file, else the recipe or study of that name, else the path unchanged."""
    path = Path(name)
    return path if is_file(path) else named.get(str(path), path)


def is_file(path: Path) -> bool:
    """Return whether this is a file, whatever the user typed."""
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name that is too long or has a NUL byte
        return False


def data_file(name: str, run_file: Path) -> str:
    """Return the path of a run's data file, which may be next to the run's file or come with nalora.

    A recipe that was copied elsewhere still finds its data.
    """
    places = [Path(name), run_file.parent / name, RECIPES / name]
    if not name.endswith(".jsonl"):
        return name
    return next((str(place) for place in places if place.is_file()), name)
