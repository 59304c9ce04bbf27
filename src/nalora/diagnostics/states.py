"""The saved states of a run that can be compared, and the channel masks in the states of its NA-LoRA controller."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from torch import Tensor

from nalora.control import checkpoint
from nalora.diagnostics.sites import GateSite
from nalora.errors import NALoRAError
from nalora.methods.method import Method
from nalora.models.adapters import is_adapter
from nalora.models.peft_names import in_wrapper
from nalora.runs import checkpoints
from nalora.runs.folder import RunFolder
from nalora.runs.saved_run import diverged_step
from nalora.runs.settings import Run


class SavedState(NamedTuple):
    """The trained weights after `step`; without a folder the base model, with which adapters start."""

    step: int
    folder: Path | None


class FinalState(NamedTuple):
    """A controller's saved state and its step (None: the end of the run)."""

    step: int | None
    controller: dict[str, Any]


def states_of(folder: RunFolder, run: Run, every: int = 1) -> tuple[list[SavedState], list[str]]:
    """Return the run's states by step, and notices about them.

    Only states whose step is a multiple of `every` are returned, and always the first and the last. Without snapshots
    these are the base model, complete checkpoints and the saved result. Raises NALoRAError for fewer than two states.
    """
    notices: list[str] = []
    if (step := diverged_step(folder)) is not None:
        notices.append(f"the run diverged at step {step}: these are its states before that")
    if not folder.result.is_file():
        notices.append("the run is not finished: these are its states so far")
    states = [SavedState(step, folder.snapshot(step)) for step in folder.snapshot_steps()]
    fix = "train with snapshot_every: N, or finish the run"
    return intact_states(states or _without_snapshots(folder, run, notices), notices, every, folder.path, fix)


def intact_states(
    states: Sequence[SavedState], notices: list[str], every: int, path: Path, fix: str
) -> tuple[list[SavedState], list[str]]:
    """Return the undamaged states, of the steps that `states_of` returns, and the notices with one for each other."""
    intact: list[SavedState] = []
    for state in states:
        if (damage := _damage(state.folder)) is None:
            intact.append(state)
        else:
            notices.append(f"step {state.step} is left out: {damage}")
    if len(intact) < 2:
        raise NALoRAError(
            str(path),
            found="; ".join([f"{len(intact)} state(s) to compare", *notices]),
            expected="at least two snapshots of the trained weights",
            fix=fix,
        )
    return [state for state in intact if state in (intact[0], intact[-1]) or state.step % every == 0], notices


def _without_snapshots(folder: RunFolder, run: Run, notices: list[str]) -> list[SavedState]:
    folders: dict[int, Path | None] = {0: None}
    complete = checkpoints.marked_complete(folder.checkpoints)
    # Checkpoints hold the adapter in its trained form; some methods save another one.
    method: Method = getattr(run.method, "host", run.method)
    if type(method).save is Method.save:
        folders |= {step: path for path in complete if (step := checkpoints.step_in(path.name))}
    elif complete:
        notices.append(f"its checkpoints are left out: {run.method.title} saves another form than it trains")
    if folder.result.is_file() and folder.trained.is_dir():
        try:
            last = int(json.loads(folder.result.read_text(encoding="utf-8"))["steps"])
        except (ValueError, TypeError, KeyError) as error:
            raise NALoRAError(
                str(folder.result),
                found="no number of steps",
                expected="the result of a finished run",
                fix="train it again",
            ) from error
        folders.setdefault(last, folder.trained)
    names = ["the base model", *(f"step {step}" for step in sorted(folders) if step)]
    notices.append(f"no snapshots (snapshot_every: N makes them): comparing {', '.join(names)}")
    return [SavedState(step, folders[step]) for step in sorted(folders)]


def _damage(folder: Path | None) -> str | None:
    """Return why a state cannot be read, or None if it can."""
    if folder is None:
        return None
    files = sorted(folder.glob("*.safetensors"))
    weights = "adapter_model" if is_adapter(folder) else "model"
    if not any(file.name.startswith(weights) for file in files):
        return f"{folder} has no weights"
    if not is_adapter(folder) and not (folder / "config.json").is_file():
        return f"{folder} has neither adapter_config.json nor config.json"
    for file in files:
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            return f"{file} is damaged ({error})"
    return None


def final_state(folder: RunFolder) -> FinalState | None:
    """Return the latest state of a run's controller; None if the run applied no mask or saved no state.

    Raises NALoRAError if the state is damaged.
    """
    saved = [(step, folder.snapshot(step)) for step in folder.snapshot_steps()]
    # A checkpoint without its mark is incomplete; snapshots are moved into place when they are complete.
    complete = checkpoints.marked_complete(folder.checkpoints)
    saved += [(checkpoints.step_in(path.name) or 0, path) for path in complete]
    saved.sort(key=lambda entry: entry[0], reverse=True)
    for step, path in [(None, folder.path), (None, folder.adapter), *saved]:
        if (path / checkpoint.FILE_NAME).is_file():
            state = checkpoint.load(path)
            return FinalState(step, state) if _applies_mask(state) else None
    return None


def masks_by_site(controller: Mapping[str, Any], sites: Sequence[GateSite]) -> dict[int, Tensor]:
    """Return the masks in a controller's state by the index of their block; none if it applied no mask."""
    if not _applies_mask(controller):
        return {}
    masks = {}
    for index, site in enumerate(sites):
        for name in (site.name, site.gate):
            mask = controller["tensors"].get(f"{in_wrapper(name)}/mask")
            if mask is not None:
                masks[index] = mask.cpu()
    return masks


def _applies_mask(controller: Mapping[str, Any]) -> bool:
    """Return False for ``mask: false``, with which the controller computes a mask but does not apply it."""
    return bool(controller["config"].get("mask", True))
