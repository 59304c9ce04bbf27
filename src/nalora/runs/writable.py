"""Check that a folder can be written to, before anything is loaded and without leaving a trace."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

from nalora.errors import NALoRAError, shortened, unusable

# Nearly every file system limits a name to 255 bytes; runs append endings to some names and prefixes to partial files.
_LONGEST_NAME = 255
_LONGEST_OWN = 150


def refuse_unwritable(path: Path, fix: str = "give another output") -> None:
    """Raise NALoRAError if nothing can be written to the folder, or to the folder in which it would be created."""
    place, expected = shortened(str(path), 200), "a folder that can be written to"
    for length in (len(os.fsencode(part)) for part in path.parts):
        if length > _LONGEST_NAME:
            expected = f"names of at most {_LONGEST_NAME} bytes"
            raise NALoRAError(place, found=f"a name of {length} bytes", expected=expected, fix=fix)
    try:
        if "\0" in place:
            raise ValueError("a NUL byte in its name")
        nearest = next(folder for folder in (path, *path.absolute().parents) if folder.exists() or folder.is_symlink())
        if not nearest.is_dir():
            found = "a file" if nearest == path else f"{nearest}, which is a file and not a folder"
            raise NALoRAError(place, found=found, expected=expected, fix=fix)
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise PermissionError(None, "Permission denied")
        with tempfile.TemporaryFile(dir=nearest, prefix=".nalora-"):  # removed at once
            pass
    except (OSError, ValueError) as error:
        raise unusable(place, "written to", error, expected, fix) from error


def folder_name(text: str) -> str:
    """Return a path or a hub id as the name of one folder; a name that would be too long ends in a digest."""
    name = text.replace("/", "--")
    if len(os.fsencode(name)) <= _LONGEST_OWN:
        return name
    return f"{name[:40]}…{hashlib.sha256(os.fsencode(name)).hexdigest()[:16]}"
