"""When a run writes checkpoints, and that each is on the disk before it counts.

A kill -9 or a power cut must not cost hours, so by default a checkpoint is written every few minutes of wall clock.
Their cost is bounded: all of them together take at most 5 % of the time, so a large state is saved less often.
"""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from nalora.control.hooks import wrap_method
from nalora.distributed import processes
from nalora.runs import checkpoints
from nalora.runs.folder import RunFolder
from nalora.runs.lock import FolderLock

SHARE_OF_TIME = 0.05
# Bytes per second that the first checkpoint is expected to be written with; later ones go by what it took.
_EXPECTED_SPEED = 500e6
_WEIGHTS_AND_ADAMS_MOMENTS = 3


def _say(line: str) -> None:
    """Not a log record: the command line switches the loggers of all libraries off."""
    print(f"nalora: {line}", file=sys.stderr, flush=True)


class SaveTimes(TrainerCallback):  # type: ignore[misc]
    """Decides on checkpoints by the clock, marks those that are complete and removes those that are too old.

    To be added after all other callbacks: whatever they write into a checkpoint is then part of it.

    Args:
        folder: of the run.
        minutes: between checkpoints; 0: none by the clock.
        lock: of the folder, in the first process.
    """

    def __init__(self, folder: RunFolder, minutes: float, lock: FolderLock | None = None) -> None:
        self.folder, self.interval, self.lock = folder, 60 * minutes, lock
        self.spent = 0.0
        self._cost: float | None = None
        self._save_began: float | None = None
        self._told_of_room = False

    def install(self, trainer: Any) -> None:
        """Follow the trainer."""
        wrap_method(trainer, "_save_checkpoint", before=self._begin)
        trainer.add_callback(self)
        self.trainer = trainer
        self.began = self.last_save = time.monotonic()

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The clock starts."""
        self.began = self.last_save = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """Save if it is time; all processes do what the first one decides."""
        if self.lock is not None:
            self.lock.refuse_if_lost()
        wanted = control.should_save
        if processes.is_first_process():
            wanted = self._has_place(state.global_step) if wanted else self._is_due(state)
        if processes.count() > 1:
            wanted = bool(processes.broadcast_from_first(int(wanted), args.device))
        control.should_save = wanted
        return control

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """No process will write any more into the checkpoint: it is complete once the disk has it."""
        processes.barrier()
        if processes.is_first_process():
            checkpoints.complete(self._checkpoint(state.global_step))
            checkpoints.rotate(self.folder.checkpoints)
        self.last_save = time.monotonic()
        if self._save_began is not None:
            self._cost = self.last_save - self._save_began
            self.spent += self._cost

    def _begin(self, *_: Any, **__: Any) -> None:
        self._save_began = time.monotonic()
        if processes.is_first_process():
            checkpoints.begin(self._checkpoint(self.trainer.state.global_step))
        processes.barrier()  # the others write into the folder that the first one made

    def _checkpoint(self, step: int) -> Path:
        return self.folder.checkpoints / f"checkpoint-{step}"

    def _is_due(self, state: Any) -> bool:
        """Whether the interval is over and the time spent on checkpoints stays within its share with one more."""
        now = time.monotonic()
        if not self.interval or now - self.last_save < self.interval or state.global_step >= state.max_steps:
            return False
        size = self._expected_size()
        cost = size / _EXPECTED_SPEED if self._cost is None else self._cost
        if self.spent + cost > SHARE_OF_TIME * (now - self.began + cost):
            return False
        return self._has_place(state.global_step) and self._has_room(size)

    def _has_place(self, step: int) -> bool:
        """Whether the name is free; a folder of that name that nalora did not write stays as it is."""
        free = checkpoints.is_free(self._checkpoint(step))
        if not free:
            _say(f"no checkpoint at step {step}: {self._checkpoint(step)} is not nalora's")
        return free

    def _has_room(self, size: float) -> bool:
        """Whether the disk has room: a checkpoint that nobody asked for must not end the run."""
        enough = shutil.disk_usage(self.folder.path).free > 1.2 * size + 2**26
        if not enough and not self._told_of_room:
            _say(f"no checkpoints for now: {self.folder.path} has no room for {size / 2**30:.1f} GiB")
        self._told_of_room = not enough
        return enough

    def _expected_size(self) -> float:
        trained = (p for p in self.trainer.model.parameters() if p.requires_grad)
        return _WEIGHTS_AND_ADAMS_MOMENTS * float(sum(p.numel() * p.element_size() for p in trained))
