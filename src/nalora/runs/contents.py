"""The entries of a run's folder that belong to nalora: only these are ever overwritten or removed."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from nalora.errors import NALoRAError, wrong_kind
from nalora.files import yaml_reader
from nalora.files.atomic import read_json
from nalora.runs import checkpoints, old_names
from nalora.runs.marker import MARKER, is_marked
from nalora.runs.settings import RunSettings, check

LOCK = ".nalora-lock.json"
FILES = (
    "run.yaml", "environment.json", "metrics.jsonl", "gates.jsonl", "diagnosis.json", "diagnosis_channels.safetensors",
    "mismatch.json", "mismatch_channels.safetensors", "result.json", "start.safetensors", "gora.safetensors",
)  # fmt: skip
# Folders that belong to nalora as a whole, and those in which it owns only the entries that it named.
WHOLE_FOLDERS = ("adapter", "model", "start")
SHARED_FOLDERS = ("checkpoints", "snapshots", "evaluations")
_SNAPSHOT = re.compile(r"step-\d{8,}|\.step-\d{8,}\.\d+")
# Temporary files of `atomic.write` that a kill left.
_PARTIAL = re.compile(rf"\.({'|'.join(map(re.escape, (*FILES, MARKER, LOCK)))})\.[0-9a-f.]+")


def own_entries(folder: Path) -> Iterator[Path]:
    """Yield what nalora wrote into a run's folder, without evaluations and reports; lock and marker last."""
    yield from (folder / name for name in (*FILES, *WHOLE_FOLDERS) if os.path.lexists(folder / name))
    yield from (entry for entry in sorted(folder.iterdir()) if _PARTIAL.fullmatch(entry.name))
    yield from checkpoints.own(folder / "checkpoints")
    yield from (entry for entry in _entries(folder / "snapshots") if is_snapshot(entry.name))
    yield from (folder / name for name in (LOCK, MARKER) if os.path.lexists(folder / name))


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() and not folder.is_symlink() else []


def is_snapshot(name: str) -> bool:
    """Return whether this is the name of a snapshot, or of one that was being written when the run was killed."""
    return _SNAPSHOT.fullmatch(name) is not None


def is_barely_started(folder: Path) -> bool:
    """Return whether a marked folder holds only what a process writes before run.yaml."""
    names = {entry.name for entry in folder.iterdir() if not _PARTIAL.fullmatch(entry.name)}
    return is_marked(folder, "run") and names <= {MARKER, LOCK, "environment.json"}


def is_run_of_0_1(folder: Path) -> bool:
    """Return whether version 0.1, which wrote no marker, made this run: both its files are there and valid.

    The settings of the method and the task are not checked: reading them may run a Python file of the user's.
    """
    try:
        options = old_names.current(yaml_reader.read(folder / "run.yaml", "a run's settings", "train it again"))
        if not {"model", "task", "method"} <= options.keys():
            return False
        run_options = {name: options[name] for name in RunSettings.__dataclass_fields__ if name in options}
        check(run_options | {"method": "lora", "task": "gsm8k"})
    except NALoRAError:
        return False
    return isinstance((read_json(folder / "environment.json") or {}).get("versions"), dict)


def is_run(folder: Path) -> bool:
    """Return whether nalora made the folder for a run."""
    return is_marked(folder, "run") or is_run_of_0_1(folder)


def refuse_wrong_types(folder: Path, *names: str) -> None:
    """Raise NALoRAError if one of nalora's names is a symbolic link, or a file where a folder belongs, or the reverse.

    Writing there would leave the run's folder, or fail hours later. By default all names are checked.
    """
    files = [folder / name for name in (MARKER, LOCK, *FILES)]
    folders = [folder / name for name in (*WHOLE_FOLDERS, *SHARED_FOLDERS)]
    for place in (folder / "checkpoints", folder / "snapshots"):
        names_in_place = ((entry, entry.name) for entry in _entries(place))
        folders += [path for path, name in names_in_place if is_snapshot(name) or checkpoints.step_in(name) is not None]
    for path in (path for path in (*files, *folders) if not names or path.name in names):
        is_kind, kind = (stat.S_ISDIR, "folder") if path in folders else (stat.S_ISREG, "file")
        if os.path.lexists(path) and not is_kind(path.lstat().st_mode):
            raise _refusal(path, kind)
        if path.parent == folder and path.name in WHOLE_FOLDERS and path.is_dir():
            # Libraries write into these folders file by file, and open what is there.
            for link in (entry for entry in path.rglob("*") if entry.is_symlink()):
                raise _refusal(link, "file")


def _refusal(path: Path, kind: str) -> NALoRAError:
    return wrong_kind(path, kind, f"a {kind} inside the run's folder", "move it away, or give another output=")
