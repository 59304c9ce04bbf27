"""The marker file of folders that nalora made: a folder without it that is not empty is never written to."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

from nalora import __version__
from nalora.errors import NALoRAError
from nalora.files.atomic import json_text, read_json

MARKER = ".nalora.json"
FORMAT = 1
Kind = Literal["run", "evaluation", "store", "demo", "suggest"]
_KINDS = {
    "run": "a training run",
    "evaluation": "an evaluation",
    "store": "the store of a study",
    "demo": "the demo",
    "suggest": "the short runs of `nalora suggest`",
}


class Made(NamedTuple):
    """What `mark` created: whether the folder, and whether the marker."""

    folder: bool
    marker: bool


def read(folder: Path) -> dict[str, Any] | None:
    """Return the content of a folder's marker; None without one, or if nalora did not write it."""
    path = folder / MARKER
    content = read_json(path) if path.is_file() and not path.is_symlink() else None
    types = {"nalora": str, "format": int, "kind": str}
    known = content and all(isinstance(content.get(name), kind) for name, kind in types.items())
    return content if content and known and content["kind"] in _KINDS else None


def is_marked(folder: Path, kind: Kind) -> bool:
    """Return whether nalora made the folder for this kind of content."""
    return (read(folder) or {}).get("kind") == kind


def mark(folder: Path, kind: Kind, **entries: Any) -> Made:
    """Create the folder and its marker, with further `entries`, if they are missing; call `refuse_foreign` first."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        folder.mkdir()
        new_folder = True
    except FileExistsError:
        new_folder = False
    content = json_text({"nalora": __version__, "format": FORMAT, "kind": kind, **entries}) + "\n"
    try:
        # Exclusive: of two processes that start in the same folder one creates it.
        with open(folder / MARKER, "xb") as file:
            file.write(content.encode())
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError:
        if _is_empty_marker(folder / MARKER):
            (folder / MARKER).write_bytes(content.encode())
        return Made(new_folder, False)
    return Made(new_folder, True)


def _is_empty_marker(path: Path) -> bool:
    """Return whether this is a marker that a kill, or a full disk, left empty."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return path.name == MARKER and stat.S_ISREG(status.st_mode) and status.st_size == 0


def refuse_foreign(
    folder: Path, kind: Kind, *, option: str, known: Callable[[Path], bool] = lambda folder: False
) -> None:
    """Raise NALoRAError for a place in which nalora might overwrite or remove what it did not make.

    Args:
        folder: where a command is going to write. Nothing in it is changed.
        kind: what it writes.
        option: how the user names another place, such as ``output=``.
        known: recognises a folder that a version without markers made.
    """
    if problem := _problem(folder, kind, known):
        found, fix = problem
        expected = "a new or empty folder, or one that nalora made"
        raise NALoRAError(str(folder), found=found, expected=expected, fix=f"{fix}give another {option}")


def _problem(folder: Path, kind: Kind, known: Callable[[Path], bool]) -> tuple[str, str] | None:
    """Return what is wrong, and what helps other than another folder."""
    try:
        mode = folder.lstat().st_mode
    except FileNotFoundError:
        return None
    if stat.S_ISLNK(mode):
        # Following it would write into, and on a failed start remove from, a folder that the user did not name.
        return "a symbolic link", "give the folder that it points to, or "
    if not stat.S_ISDIR(mode):
        return "a file", ""
    content = read(folder)
    if content is None:
        names = sorted(entry.name for entry in folder.iterdir() if not _is_empty_marker(entry))
        if not names or known(folder):
            return None
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        return f"a folder with files that nalora did not write ({shown})", ""
    if content["format"] > FORMAT:
        return f"a folder that nalora {content['nalora']} made", "install that version, or "
    if content["kind"] != kind:
        return f"the folder of {_KINDS[content['kind']]}", ""
    return None
