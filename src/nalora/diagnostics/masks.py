"""The channel masks that an NA-LoRA run ended with, wherever its controller's state was saved last."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from nalora import checkpoint
from nalora.diagnostics.sites import stripped
from nalora.training.folder import COMPLETE, RunFolder


class FinalMasks(NamedTuple):
    """Masks by the name of their block in the base model, and the step they are of (None: the run's end)."""

    step: int | None
    masks: dict[str, Tensor]


def final_masks(folder: RunFolder) -> FinalMasks | None:
    """The latest masks of a run; None for one that had none, or that saved no state.

    Raises:
        NALoRAError: the state is damaged.
    """
    found = _latest_state(folder)
    if found is None:
        return None
    step, place = found
    state = checkpoint.load(place)
    if not state["config"].get("mask", True):
        return None  # the controller follows a mask even then, but nothing was masked by it
    masks = {
        stripped(name.removesuffix("/mask")): mask for name, mask in state["tensors"].items() if name.endswith("/mask")
    }
    return FinalMasks(step, masks)


def _latest_state(folder: RunFolder) -> tuple[int | None, Path] | None:
    for place in (folder.path, folder.adapter):
        if (place / checkpoint.FILE_NAME).is_file():
            return None, place
    # A checkpoint without its mark was being written when the run was killed.
    whole = [each for each in folder.checkpoints.glob("checkpoint-*") if (each / COMPLETE).is_file()]
    places = [*whole, *(folder.path / "snapshots").glob("step-*")]
    states = [(_step(place), place) for place in places if (place / checkpoint.FILE_NAME).is_file()]
    return max(states, default=None)


def _step(place: Path) -> int:
    return int(place.name.rpartition("-")[2])
