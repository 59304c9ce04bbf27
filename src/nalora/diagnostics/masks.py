"""The channel masks of an NA-LoRA run: in a state of its controller, and in the last one, wherever that was saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from nalora.control import checkpoint
from nalora.diagnostics.sites import GateSite
from nalora.models.peft_names import in_wrapper
from nalora.runs import checkpoints
from nalora.runs.folder import RunFolder


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
    return FinalState(step, state) if _masked(state) else None


def masks_by_site(controller: Mapping[str, Any], sites: Sequence[GateSite]) -> dict[int, Tensor]:
    """The masks in a controller's state, by the place of their block; none where it masked nothing by them."""
    if not _masked(controller):
        return {}
    tensors, found = controller["tensors"], {}
    for index, site in enumerate(sites):
        for name in (site.name, site.gate):
            mask = tensors.get(f"{in_wrapper(name)}/mask")
            if mask is not None:
                found[index] = mask.cpu()
    return found


def _masked(controller: Mapping[str, Any]) -> bool:
    """With ``mask: false`` the controller follows a mask too, but nothing is masked by it."""
    return bool(controller["config"].get("mask", True))


def _latest(folder: RunFolder) -> tuple[int | None, Path] | None:
    for place in (folder.path, folder.adapter):
        if (place / checkpoint.FILE_NAME).is_file():
            return None, place
    # A checkpoint without its mark was being written when the run was killed; a snapshot that is there is whole.
    places = {checkpoints.step_in(each.name) or 0: each for each in checkpoints.marked_complete(folder.checkpoints)}
    places |= {step: folder.snapshot(step) for step in folder.snapshot_steps()}
    return max(((step, each) for step, each in places.items() if (each / checkpoint.FILE_NAME).is_file()), default=None)
