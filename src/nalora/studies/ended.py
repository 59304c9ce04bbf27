"""How a run of a study ended: well, through its own fault, or through none of its own."""

from __future__ import annotations

import errno
from typing import NamedTuple

from nalora.errors import NALoRAError

_DISK_FULL = "the disk is full"
TOLD_TO_END = "its process was told to end"
# Where there is no number: as safetensors says it, and torch.save, which knows only that it could not write.
_SIGNS_OF_A_FULL_DISK = (
    "No space left on device", "Disk quota exceeded", "PytorchStreamWriter failed writing", "iostream error",
)  # fmt: skip


class NotRepeated(str):
    """The text of an error after which the run is not repeated in the same sitting: it would end in the same way."""


class Ended(NamedTuple):
    """A job that came to its end; `error` says how it failed."""

    key: str
    error: str | None

    @property
    def too_crowded(self) -> bool:
        """Whether it failed for want of a GPU's memory, which beside fewer runs it might have had."""
        return self.error is not None and self.error.startswith("OutOfMemoryError")

    @property
    def may_be_repeated(self) -> bool:
        """Whether another attempt may go better: after a crash or a kill, but not after an error in the settings."""
        return not isinstance(self.error, NotRepeated) and not self.too_crowded

    @property
    def disk_full(self) -> bool:
        """Whether it could not write, which says nothing against the run."""
        return self.error is not None and self.error.startswith(_DISK_FULL)

    @property
    def told_to_end(self) -> bool:
        """Whether its process was asked to stop, which says nothing against the run."""
        return self.error == TOLD_TO_END

    @property
    def lost_the_gpu(self) -> bool:
        """Whether its process can do nothing more on its GPU: after such an error every later call fails as well."""
        return self.error is not None and "CUDA error" in self.error


def told(error: BaseException, line: int = 0) -> str:
    """What went wrong, by one line of its message; where the disk is full, that comes first."""
    lines = str(error).strip().splitlines() or [""]
    text = str(error) if isinstance(error, NALoRAError) else f"{type(error).__name__}: {lines[line]}"
    if is_disk_full(error):
        return f"{_DISK_FULL} ({text})"
    return NotRepeated(text) if isinstance(error, NALoRAError) else text


def is_disk_full(error: BaseException | None) -> bool:
    """Whether a file system or a quota has no room left, whatever that error was wrapped in."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if any(sign in str(error) for sign in _SIGNS_OF_A_FULL_DISK):
            return True
        error = error.__cause__ or error.__context__
    return False
