"""The channel masks that an NA-LoRA run ended with, wherever its controller's state was saved last."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from nalora import checkpoint
from nalora.training.folder import COMPLETE, RunFolder


class FinalState(NamedTuple):
    """A controller's state as it was saved, and the step it is of (None: the run's end)."""

    step: int | None
    controller: dict[str, Any]


def final_state(folder: RunFolder) -> FinalState | None:
    """The latest state of a run's controller; None for a run that masked nothing, or that saved none.

    Raises:
        NALoRAError: the state is damaged.
    """
    found = _latest(folder)
    if found is None:
        return None
    step, place = found
    state = checkpoint.load(place)
    if not state["config"].get("mask", True):
        return None  # the controller follows a mask even then, but nothing was masked by it
    return FinalState(step, state)


def _latest(folder: RunFolder) -> tuple[int | None, Path] | None:
    for place in (folder.path, folder.adapter):
        if (place / checkpoint.FILE_NAME).is_file():
            return None, place
    # A checkpoint without its mark was being written when the run was killed; a snapshot that is there is whole.
    places = {
        int(each.name.rpartition("-")[2]): each
        for each in folder.checkpoints.glob("checkpoint-*")
        if (each / COMPLETE).is_file()
    }
    places |= {step: folder.snapshot(step) for step in folder.snapshot_steps()}
    return max(((step, each) for step, each in places.items() if (each / checkpoint.FILE_NAME).is_file()), default=None)
