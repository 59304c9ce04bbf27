"""When a run writes checkpoints; each is on the disk before it is marked complete.

A kill -9 or a power cut must not cost hours, so by default a checkpoint is written every few minutes of wall clock.
Their cost is bounded: all of them together take at most 5 % of the time, so a large state is saved less often.
"""

from __future__ import annotations

import shutil
import sys
import time
from typing import Any

from transformers import TrainerCallback

from nalora.control.hooks import wrap_method
from nalora.distributed import processes
from nalora.runs import checkpoints
from nalora.runs.folder import RunFolder
from nalora.runs.lock import FolderLock

SHARE_OF_TIME = 0.05
# Bytes per second that the first checkpoint is expected to take; later estimates use its measured time.
_EXPECTED_SPEED = 500e6
_WEIGHTS_AND_ADAMS_MOMENTS = 3


def _warn(line: str) -> None:
    """Print to stderr: the command line switches the loggers of all libraries off."""
    print(f"nalora: {line}", file=sys.stderr, flush=True)


class CheckpointSchedule(TrainerCallback):  # type: ignore[misc]
    """Decides on checkpoints by the clock, marks complete ones and removes old ones.

    Must be installed after all other callbacks, so that what they write into a checkpoint is part of it. With 0
    `minutes` none is written by the clock.
    """

    def __init__(self, folder: RunFolder, minutes: float, lock: FolderLock | None = None) -> None:
        self.folder, self.interval, self.lock = folder, 60 * minutes, lock
        self.spent = 0.0
        self._cost: float | None = None
        self._save_began: float | None = None
        self._warned_of_space = False

    def install(self, trainer: Any) -> None:
        """Add this to the trainer's callbacks."""
        wrap_method(trainer, "_save_checkpoint", before=self._begin)
        trainer.add_callback(self)
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start the clock."""
        self.began = self.last_save = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """Save if it is time; the first process decides for all."""
        if self.lock is not None:
            self.lock.refuse_if_lost()
        save = control.should_save
        if processes.is_first_process():
            save = self._is_name_free(state.global_step) if save else self._is_due(state)
        if processes.count() > 1:
            save = bool(processes.broadcast_from_first(int(save), args.device))
        control.should_save = save
        return control

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Mark the checkpoint complete: no process writes into it any more."""
        processes.barrier()
        if processes.is_first_process():
            checkpoints.complete(self.folder.checkpoint(state.global_step))
            checkpoints.rotate(self.folder.checkpoints)
        self.last_save = time.monotonic()
        if self._save_began is not None:
            self._cost = self.last_save - self._save_began
            self.spent += self._cost

    def _begin(self, *_: Any, **__: Any) -> None:
        self._save_began = time.monotonic()
        if processes.is_first_process():
            checkpoints.begin(self.folder.checkpoint(self.trainer.state.global_step))
        processes.barrier()  # the others write into the folder that the first one created

    def _is_due(self, state: Any) -> bool:
        """Return whether the interval is over and one more checkpoint stays within the share of the time."""
        now = time.monotonic()
        if not self.interval or now - self.last_save < self.interval or state.global_step >= state.max_steps:
            return False
        trainable = (p for p in self.trainer.model.parameters() if p.requires_grad)
        size = _WEIGHTS_AND_ADAMS_MOMENTS * float(sum(p.numel() * p.element_size() for p in trainable))
        cost = size / _EXPECTED_SPEED if self._cost is None else self._cost
        if self.spent + cost > SHARE_OF_TIME * (now - self.began + cost):
            return False
        return self._is_name_free(state.global_step) and self._has_space(size)

    def _is_name_free(self, step: int) -> bool:
        """Return whether the name is free; a folder of that name that nalora did not write stays unchanged."""
        free = checkpoints.is_free(self.folder.checkpoint(step))
        if not free:
            _warn(f"no checkpoint at step {step}: {self.folder.checkpoint(step)} is not nalora's")
        return free

    def _has_space(self, size: float) -> bool:
        """Return whether the disk has space: a checkpoint by the clock must not end the run."""
        enough = shutil.disk_usage(self.folder.path).free > 1.2 * size + 2**26
        if not enough and not self._warned_of_space:
            _warn(f"no checkpoints for now: {self.folder.path} has no space for {size / 2**30:.1f} GiB")
        self._warned_of_space = not enough
        return enough
