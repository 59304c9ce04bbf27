"""The same comparison while a run trains: at chosen steps, with the state at the comparison before.

Earlier states wait on the CPU: an adapter's weights, or the whole model's after full fine-tuning. For the moment of a
comparison the trained part is on the device twice, on the same frozen base.
"""

from __future__ import annotations

import json
import time
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from nalora.diagnostics.compare import Comparison, compare
from nalora.diagnostics.file import Interval, State, assembled, described, histogram_row, interval_row, share_row
from nalora.diagnostics.masks import masks_by_site
from nalora.diagnostics.probe import batches_of
from nalora.diagnostics.sites import find_sites
from nalora.diagnostics.twins import twin
from nalora.training.divergence import finite_parameters
from nalora.training.folder import RunFolder, write_json
from nalora.training.material import Material
from nalora.training.settings import Run

Weights = dict[str, Tensor]


class OnlineDiagnosis(TrainerCallback):  # type: ignore[misc]
    """Writes diagnosis.json anew at every comparison. Training is not changed by it, to the last bit.

    Args:
        folder: of the run.
        run: its settings: how often, on how many of its training examples.
        material: those examples, as they are trained on.
        controller: NA-LoRA's, whose mask weights D_EH; None without it.
    """

    def __init__(self, folder: RunFolder, run: Run, material: Material, controller: Any) -> None:
        self.folder, self.run, self.controller = folder, run, controller
        settings = run.settings
        rows = [material.dataset[i] for i in range(min(settings.probe_size, len(material.dataset)))]
        size = settings.micro_batch_size or settings.batch_size
        self.examples = len(rows)
        # Half of what training takes at a time, for each of two models.
        self.batches = batches_of(rows, material.collator, max(1, size // 2))
        self.intervals: list[dict[str, Any]] = []
        self.shares: list[dict[str, Any]] = []
        self.histograms: list[tuple[int, list[list[int]]]] = []
        self.ends: dict[str, Any] | None = None
        self.notices: list[str] = []
        self.seconds, self.passes, self.tokens = 0.0, 0, 0

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Remember the start; a resumed run goes on from where it resumes."""
        if not state.is_world_process_zero:
            return
        self.sites = find_sites(model)
        self.before: tuple[int, Weights] = (state.global_step, _weights(model))
        self.first = self.before
        if state.global_step:
            self._take_over(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Compare, if this is a step for it."""
        step, last = state.global_step, state.global_step == state.max_steps
        due = step % self.run.settings.diagnose_every == 0 or last
        # Of parameters that are not finite nothing can be measured: the run is about to end as diverged.
        if due and finite_parameters(model) and state.is_world_process_zero:
            self._diagnose(model, step, last)

    def _diagnose(self, model: nn.Module, step: int, last: bool) -> None:
        began = time.perf_counter()
        other = twin(model)
        new = not self.shares
        found = self._compare(other, model, self.before, [0, 1] if new else [1], [0] * new + [1] * last)
        reached = sorted(found.movements)
        masks = masks_by_site(self.controller.state_dict(), self.sites) if self.controller else {}
        self.intervals.append(interval_row(Interval(self.before[0], step, found.movements, masks), reached))
        for place, at in enumerate((self.before[0], step)):
            if place in found.standings:
                standing = State(at, found.standings[place])
                self.shares.append(share_row(standing, reached))
                if (row := histogram_row(standing, reached)) is not None:
                    self.histograms.append(row)
        if last and len(self.intervals) == 1:
            self.ends = self.intervals[0]
        elif last and self.first[0] == self.shares[0]["step"]:
            ends = self._compare(other, model, self.first, [], [])
            self.ends = interval_row(Interval(self.first[0], step, ends.movements, masks), reached)
        elif last:
            self.notices.append("the run was resumed: its first state is gone, so first_to_last is missing")
        self.before = (step, _weights(model))
        self.seconds += time.perf_counter() - began
        self._write([described(self.sites[index]) for index in reached])

    def _compare(
        self, other: nn.Module, model: nn.Module, before: tuple[int, Weights], stand: list[int], histogram: list[int]
    ) -> Comparison:
        with torch.no_grad():
            for name, parameter in other.named_parameters():
                if name in before[1]:
                    parameter.copy_(before[1][name])
        found = compare(other, model, self.batches, self.sites, stand=stand, histogram=histogram)
        self.passes += found.forward_passes
        self.tokens = max(each.tokens for each in found.movements.values())
        return found

    def _write(self, blocks: list[dict[str, Any]]) -> None:
        settings = self.run.settings
        probe = {"task": settings.task, "examples": self.examples, "tokens": self.tokens, "seed": settings.seed}
        passes = self.passes / len(self.batches) / len(self.shares)
        diagnosis = {
            "run": str(self.folder.path),
            "method": self.run.method.name,
            "model": settings.model,
            "probe": probe,
            **assembled(blocks, self.intervals, self.ends, self.shares, self.histograms),
            "channels": None,
            "notices": self.notices,
            "online": True,
            "cost": {
                "seconds": round(self.seconds, 2),
                "forward_passes_per_checkpoint": passes,
                "peak_memory_ratio": None,
            },
        }
        write_json(self.folder.diagnosis, diagnosis)

    def _take_over(self, step: int) -> None:
        """What an interrupted run wrote, up to the step that it goes on from."""
        try:
            written = json.loads(self.folder.diagnosis.read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError):
            return
        if not written.get("online"):
            return
        self.intervals = [row for row in written["intervals"] if row["to"] <= step]
        if self.intervals:
            known = {self.intervals[0]["from"], *(row["to"] for row in self.intervals)}
            self.shares = [row for row in written["shares"] if row["step"] in known]
            found = zip(written["histogram"]["steps"], written["histogram"]["counts"], strict=True)
            self.histograms = [(at, counts) for at, counts in found if at in known]
            self.seconds = written["cost"]["seconds"]
            if self.intervals[-1]["to"] < step:
                self.notices.append(f"resumed at step {step}: what moved since the comparison before is missing")


def _weights(model: nn.Module) -> Weights:
    """What is trained, on the CPU."""
    return {
        name: parameter.detach().to("cpu", copy=True)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
