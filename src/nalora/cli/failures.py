"""One sentence in place of a traceback for errors of the machine: a full disk, no permission, a missing file."""

from __future__ import annotations

from nalora.errors import NALoRAError, shortened
from nalora.studies.outcome import is_disk_full


def message_of(error: Exception) -> str | None:
    """Return the message for the user; None if it is a bug of nalora, whose traceback is needed."""
    if isinstance(error, NALoRAError):
        return str(error)
    path = _path(error)
    if is_disk_full(error):
        refusal = NALoRAError(
            path or "disk",
            found="that the disk is full",
            expected="room for the files that are written",
            fix="make room, then start the same command again; add --resume to continue a run",
        )
    elif isinstance(error, OSError) and error.strerror and error.filename is not None:
        refusal = NALoRAError(
            path or "file",
            found=error.strerror,
            expected="a file or folder that the command can read and write",
            fix="check the path and its permissions, or give another",
        )
    else:
        return None
    return str(refusal)


def _path(error: BaseException | None) -> str | None:
    """Return the first path that the error, or one that caused it, names."""
    while error is not None:
        if isinstance(error, OSError) and error.filename is not None:
            return shortened(str(error.filename), 200)
        error = error.__cause__ or error.__context__
    return None
