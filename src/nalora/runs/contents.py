"""Which files and folders of a run's folder are nalora's: only these are ever overwritten or removed."""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nalora.errors import NALoRAError, wrong_kind
from nalora.files import yaml_reader
from nalora.runs import checkpoints
from nalora.runs.marker import MARKER, is_marked
from nalora.runs.settings import RunSettings, check

LOCK = ".nalora-lock.json"
FILES = (
    "run.yaml", "environment.json", "metrics.jsonl", "gates.jsonl", "diagnosis.json", "diagnosis_channels.safetensors",
    "mismatch.json", "mismatch_channels.safetensors", "result.json", "start.safetensors", "gora.safetensors",
)  # fmt: skip
# As a whole, and those in which nalora owns only the entries that it names.
WHOLE_FOLDERS = ("adapter", "model", "start")
SHARED_FOLDERS = ("checkpoints", "snapshots", "evaluations")
_SNAPSHOT = re.compile(r"step-\d{8,}|\.step-\d{8,}\.\d+")
# Files that `whole_files` was writing when the process was killed.
_PARTIAL = re.compile(rf"\.({'|'.join(map(re.escape, (*FILES, MARKER, LOCK)))})\.[0-9a-f.]+")


def own_entries(folder: Path) -> Iterator[Path]:
    """What nalora wrote into a run's folder up to its end, without evaluations and reports; marker and lock last."""
    for name in (*FILES, *WHOLE_FOLDERS):
        if exists(folder / name):
            yield folder / name
    for entry in sorted(folder.iterdir()):
        if _PARTIAL.fullmatch(entry.name):
            yield entry
    yield from checkpoints.own(folder / "checkpoints")
    snapshots = folder / "snapshots"
    if snapshots.is_dir() and not snapshots.is_symlink():
        yield from (entry for entry in sorted(snapshots.iterdir()) if is_snapshot(entry.name))
    yield from (folder / name for name in (LOCK, MARKER) if exists(folder / name))


def is_snapshot(name: str) -> bool:
    """Whether that is the name of a snapshot, or of one that was being written when the run was killed."""
    return _SNAPSHOT.fullmatch(name) is not None


def left_of_a_start(folder: Path) -> bool:
    """Whether a marked folder holds nothing but what a process writes before its run.yaml."""
    names = {entry.name for entry in folder.iterdir() if not _PARTIAL.fullmatch(entry.name)}
    return is_marked(folder, "run") and names <= {MARKER, LOCK, "environment.json"}


def is_run_of_0_1(folder: Path) -> bool:
    """Whether version 0.1, which wrote no marker, made this run: run.yaml has settings that hold, with its companion.

    The settings of the method and the task are not looked at: to read them may mean to run a file of the user's.
    """
    try:
        settings = yaml_reader.read(folder / "run.yaml", "a run's settings", "train it again")
        environment = json.loads((folder / "environment.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, NALoRAError):
        return False
    if not {"model", "task", "method"} <= settings.keys():
        return False
    if not isinstance(environment, dict) or not isinstance(environment.get("versions"), dict):
        return False
    own: dict[str, Any] = {name: settings[name] for name in RunSettings.__dataclass_fields__ if name in settings}
    try:
        check(own | {"method": "lora", "task": "gsm8k"})
    except NALoRAError:
        return False
    return True


def is_run(folder: Path) -> bool:
    """Whether nalora made the folder for a run."""
    return is_marked(folder, "run") or is_run_of_0_1(folder)


def refuse_odd_entries(folder: Path, *names: str) -> None:
    """Refuse a run in which a name of nalora's is a symbolic link, or a file where a folder belongs.

    Args:
        folder: of the run.
        names: those that are going to be written; all of nalora's by default.

    Raises:
        NALoRAError: writing there would leave the run's folder, or fail hours later.
    """
    places = [folder / name for name in (*WHOLE_FOLDERS, *SHARED_FOLDERS)]
    wanted = {MARKER: stat.S_ISREG, LOCK: stat.S_ISREG, **dict.fromkeys(FILES, stat.S_ISREG)}
    kinds = {folder / name: kind for name, kind in wanted.items()} | dict.fromkeys(places, stat.S_ISDIR)
    for place in (folder / "checkpoints", folder / "snapshots"):
        if place.is_dir() and not place.is_symlink():
            kinds |= {entry: stat.S_ISDIR for entry in place.iterdir() if _is_own_name(entry.name)}
    for path, is_kind in kinds.items():
        if names and path.name not in names:
            continue
        if path.parent == folder and path.name in WHOLE_FOLDERS:
            _refuse_links_inside(path)
        if exists(path) and not is_kind(path.lstat().st_mode):
            expected = "folder" if is_kind is stat.S_ISDIR else "file"
            raise wrong_kind(
                path, expected, f"a {expected} inside the run's folder", "move it away, or give another output="
            )


def _refuse_links_inside(folder: Path) -> None:
    """Libraries write into these folders file by file, and open what is there."""
    for entry in folder.rglob("*") if folder.is_dir() and not folder.is_symlink() else ():
        if entry.is_symlink():
            raise wrong_kind(entry, "file", "a file inside the run's folder", "move it away, or give another output=")


def _is_own_name(name: str) -> bool:
    return checkpoints.step_in(name) is not None or is_snapshot(name)


def exists(path: Path) -> bool:
    """Whether anything has that name, a broken symbolic link included."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True
