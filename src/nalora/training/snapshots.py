"""Records for later analysis of the gates: snapshots of what is trained, and a row of gate metrics per logged step.

The first line of gates.jsonl has the blocks, and why a control does not act on a block (empty if it acts). Each further
line has, for a logged step, a list per metric with one entry for each block; null where a block has no such value.
snapshots/step-00000010/ is what the run would have saved at that step and, under NA-LoRA, the controller's state.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from torch import nn
from transformers import TrainerCallback

from nalora.control.metrics import FOLLOWED, NAMES
from nalora.distributed.processes import is_first_process
from nalora.files.atomic import json_text, note_created
from nalora.methods.method import Method
from nalora.models.peft_names import in_base
from nalora.runs.folder import RunFolder
from nalora.training.divergence import finite_parameters


class GateRecord(TrainerCallback):  # type: ignore[misc]
    """Writes gates.jsonl from a controller's metrics of every block."""

    def __init__(self, folder: RunFolder, controller: Any) -> None:
        self.folder, self.controller = folder, controller
        self.blocks: list[str] = [plan.block.name for plan in controller.plan.blocks]

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Write the first line, unless a resumed run's file has it."""
        file = self.folder.gates
        if state.is_world_process_zero and not (file.is_file() and file.stat().st_size):
            plans = self.controller.plan.blocks
            thresholds = [plan.thresholds for plan in plans]
            self._append({
                "blocks": [in_base(name) for name in self.blocks],
                "activations": [plan.block.activation.name for plan in plans],
                "thresholds": [list(pair) if pair[0] < pair[1] else None for pair in thresholds],
                "mask_off": [plan.mask_off for plan in plans],
                "scaling_off": [plan.scaling_off for plan in plans],
            })  # fmt: skip

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """Write a row for each logged step."""
        if state.is_world_process_zero and logs and "loss" in logs:
            values = self.controller.metrics(per_block=True)
            names = [*NAMES, *(name for name in FOLLOWED.values() if name in values)]
            columns = {name: [_rounded(values.get(f"{block}/{name}")) for block in self.blocks] for name in names}
            self._append({"step": state.global_step, **columns})

    def _append(self, row: dict[str, Any]) -> None:
        if not self.folder.gates.exists():
            note_created(self.folder.gates)
        with self.folder.gates.open("a", encoding="utf-8") as file:
            file.write(json_text(row) + "\n")


class Snapshots(TrainerCallback):  # type: ignore[misc]
    """Saves what is trained before the first step, every `every` steps and after the last, as `method` saves it."""

    def __init__(
        self, folder: RunFolder, every: int, last: int, method: Method, model: nn.Module, controller: Any
    ) -> None:
        self.folder, self.every, self.last, self.method = folder, every, last, method
        self.model, self.controller = model, controller

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Save before the first step; a resumed run has that snapshot."""
        if state.global_step == 0:
            self.save(0)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Save after the step, including the controller's part of it."""
        step = state.global_step
        if (step % self.every == 0 or step == self.last) and finite_parameters(self.model):
            self.save(step)

    def save(self, step: int) -> Path:
        """Write a snapshot under a temporary name, then rename it, so that every named one is complete.

        Every process takes part, because each may hold a shard of the model; the first one writes.
        """
        place = self.folder.snapshot(step)
        partial = place.with_name(f".{place.name}.{os.getpid()}")
        self.method.save(self.model, partial)
        if not is_first_process():
            return place
        if self.controller is not None:
            self.controller.save(partial)
        if place.is_dir():
            shutil.rmtree(place)
        partial.replace(place)
        note_created(place)
        return place


def _rounded(value: float | None) -> float | None:
    """Round to five significant digits: enough for a figure, and a third of the file size."""
    return None if value is None else float(f"{value:.5g}")
