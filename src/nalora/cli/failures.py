"""What the machine refuses, as one sentence in place of a traceback: a full disk, no right to write, a lost file."""

from __future__ import annotations

from nalora.errors import NALoRAError, shortened
from nalora.studies.outcome import is_disk_full


def one_sentence(error: Exception) -> str | None:
    """What to tell the user; None where it is a fault of this program, whose traceback is wanted.

    Args:
        error: what ended a command.
    """
    if isinstance(error, NALoRAError):
        return str(error)
    if is_disk_full(error):
        place = _place(error)
        return str(
            NALoRAError(
                place or "disk",
                found="that the disk is full",
                expected="room for what is written",
                fix="make room, then start the same command again; a run goes on with --resume",
            )
        )
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return str(
            NALoRAError(
                _place(error) or "file",
                found=error.strerror,
                expected="a file or folder that can be read and written as the command needs it",
                fix="check the path and its permissions, or give another",
            )
        )
    return None


def _place(error: BaseException | None) -> str | None:
    """The first file that the error or what caused it names."""
    while error is not None:
        if isinstance(error, OSError) and error.filename is not None:
            return shortened(str(error.filename), 200)
        error = error.__cause__ or error.__context__
    return None
