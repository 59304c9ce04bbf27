"""How a job of a study ended: successfully, with an error of the run, or for a reason outside the run."""

from __future__ import annotations

import errno
from typing import NamedTuple

from nalora.errors import NALoRAError

_DISK_FULL = "the disk is full"
TERMINATED = "its process was terminated"
# Messages without an error number: those of safetensors, and of torch.save, which only knows that it could not write.
_DISK_FULL_MESSAGES = (
    "No space left on device", "Disk quota exceeded", "PytorchStreamWriter failed writing", "iostream error",
)  # fmt: skip


class PermanentError(str):
    """The message of an error that would occur again: the run is not repeated by the same command."""


class Outcome(NamedTuple):
    """The key of a job that has ended, and its error message if it failed."""

    key: str
    error: str | None

    @property
    def out_of_gpu_memory(self) -> bool:
        """Whether the GPU's memory was exhausted, which may not happen with fewer runs on the GPU."""
        return self.error is not None and self.error.startswith("OutOfMemoryError")

    @property
    def may_be_repeated(self) -> bool:
        """Whether another attempt may succeed: after a crash or a kill, but not after an error in the settings."""
        return not isinstance(self.error, PermanentError) and not self.out_of_gpu_memory

    @property
    def disk_full(self) -> bool:
        """Whether the disk was full, which is not an error of the run."""
        return self.error is not None and self.error.startswith(_DISK_FULL)

    @property
    def terminated(self) -> bool:
        """Whether its process was asked to stop, which is not an error of the run."""
        return self.error == TERMINATED

    @property
    def lost_the_gpu(self) -> bool:
        """Whether its process cannot use its GPU any more: after such an error every later call fails as well."""
        return self.error is not None and "CUDA error" in self.error


def describe_error(error: BaseException, line: int = 0) -> str:
    """Return one line of the error's message with its type; a full disk is named first."""
    lines = str(error).strip().splitlines() or [""]
    text = str(error) if isinstance(error, NALoRAError) else f"{type(error).__name__}: {lines[line]}"
    if is_disk_full(error):
        return f"{_DISK_FULL} ({text})"
    return PermanentError(text) if isinstance(error, NALoRAError) else text


def is_disk_full(error: BaseException | None) -> bool:
    """Whether the error, or one that caused it, says that a file system or a quota is full."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if any(message in str(error) for message in _DISK_FULL_MESSAGES):
            return True
        error = error.__cause__ or error.__context__
    return False
