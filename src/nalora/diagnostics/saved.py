"""Which states of a run there are to compare: its snapshots or, without any, its checkpoints and what it saved."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from nalora.diagnostics.twins import is_adapter
from nalora.errors import NALoRAError
from nalora.methods.method import Method
from nalora.runs import checkpoints
from nalora.runs.folder import RunFolder
from nalora.runs.saved_run import diverged_step
from nalora.runs.settings import Run


@dataclass(frozen=True)
class Saved:
    """What was trained after `step`; without a folder the base model itself, which is where adapters start."""

    step: int
    folder: Path | None


def states_of(folder: RunFolder, run: Run, every: int = 1) -> tuple[list[Saved], list[str]]:
    """The states in the order of their steps, and what a reader should know of them.

    Args:
        folder: of the run.
        run: its settings.
        every: only steps that are multiples of this; the first and the last are always among them.

    Raises:
        NALoRAError: fewer than two of them.
    """
    notices: list[str] = []
    if (step := diverged_step(folder)) is not None:
        notices.append(f"the run diverged at step {step}: these are its states before that")
    if not folder.result.is_file():
        notices.append("the run is not finished: this is what there is of it so far")
    found = [Saved(step, folder.snapshot(step)) for step in folder.snapshot_steps()]
    if not found:
        found = _without_snapshots(folder, run, notices)
    whole: list[Saved] = []
    for saved in found:
        if (damage := _damage(saved.folder)) is None:
            whole.append(saved)
        else:
            notices.append(f"step {saved.step} is left out: {damage}")
    if len(whole) < 2:
        raise NALoRAError(
            str(folder.path),
            found="; ".join([f"{len(whole)} state(s) to compare", *notices]),
            expected="at least two snapshots of what was trained",
            fix="train with snapshot_every: N, or finish the run",
        )
    thinned = [each for each in whole if each in (whole[0], whole[-1]) or each.step % every == 0]
    return thinned, notices


def _last_step(result: Path) -> int:
    """The steps that a finished run took.

    Raises:
        NALoRAError: its result.json does not say.
    """
    try:
        return int(json.loads(result.read_text(encoding="utf-8"))["steps"])
    except (ValueError, TypeError, KeyError) as error:
        raise NALoRAError(
            str(result), found="no number of steps", expected="the result of a finished run", fix="train it again"
        ) from error


def _without_snapshots(folder: RunFolder, run: Run, notices: list[str]) -> list[Saved]:
    """The base model, whole checkpoints, and what the run saved at its end."""
    found = {0: Saved(0, None)}
    complete = checkpoints.marked_complete(folder.checkpoints)
    # Checkpoints hold the adapter in the form in which it is trained; some methods save another one.
    if _saves_what_it_trains(run.method):
        found |= {step: Saved(step, each) for each in complete if (step := checkpoints.step_in(each.name))}
    elif complete:
        notices.append(f"its checkpoints are left out: {run.method.title} saves another form than it trains")
    if folder.result.is_file() and folder.trained.is_dir():
        step = _last_step(folder.result)
        found.setdefault(step, Saved(step, folder.trained))
    told = ["the base model", *(f"step {step}" for step in sorted(found) if step)]
    notices.append(f"no snapshots (snapshot_every: N makes them): comparing {', '.join(told)}")
    return [found[step] for step in sorted(found)]


def _saves_what_it_trains(method: Method) -> bool:
    trains = getattr(method, "host", method)
    return type(trains).save is Method.save


def _damage(folder: Path | None) -> str | None:
    """Why a state cannot be read; None where it can."""
    if folder is None:
        return None
    files = sorted(folder.glob("*.safetensors"))
    weights = [each for each in files if each.name.startswith("adapter_model" if is_adapter(folder) else "model")]
    if not weights:
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
