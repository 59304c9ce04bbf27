"""Whether a folder can be written to, found out before anything is loaded and without leaving a trace."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

from nalora.errors import NALoRAError, shortened, unusable

# Of a file's name on nearly every file system; a run adds endings to some, and partial files a prefix.
_LONGEST_NAME = 255
_LONGEST_OWN = 150


def refuse_unusable(path: Path, fix: str = "give another output") -> None:
    """Refuse a folder in which nothing can be written; one that is not there yet, by the folder it would be made in.

    Args:
        path: the folder.
        fix: what the user can do.

    Raises:
        NALoRAError: a file is in its place, its name is too long, or the system does not let this process write there.
    """
    expected = "a folder that can be written to"
    place = shortened(str(path), 200)
    if too_long := [part for part in path.parts if len(os.fsencode(part)) > _LONGEST_NAME]:
        count = len(os.fsencode(too_long[0]))
        raise NALoRAError(
            place, found=f"a name of {count} bytes", expected=f"names of at most {_LONGEST_NAME} bytes", fix=fix
        )
    try:
        if "\0" in place:
            raise ValueError("a NUL byte in its name")
        nearest = next(each for each in (path, *path.absolute().parents) if each.exists() or each.is_symlink())
        if not nearest.is_dir():
            named = "a file" if nearest == path else f"{nearest}, which is a file and no folder"
            raise NALoRAError(place, found=named, expected=expected, fix=fix)
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise PermissionError(None, "Permission denied")
        with tempfile.TemporaryFile(dir=nearest, prefix=".nalora-"):  # gone at once; some systems never show it
            pass
    except (OSError, ValueError) as error:
        raise unusable(place, "written to", error, expected, fix) from error


def as_a_name(text: str) -> str:
    """A path or a hub id as the name of one folder; what is too long for that ends in a digest."""
    name = text.replace("/", "--")
    if len(os.fsencode(name)) <= _LONGEST_OWN:
        return name
    return f"{name[:40]}…{hashlib.sha256(os.fsencode(name)).hexdigest()[:16]}"
