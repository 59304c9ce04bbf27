"""How far gates and weights have moved since the start, in the log's rows of chosen early steps.

The gates of the first training examples are kept before the first step and compared with those after the chosen steps,
by the measures of `nalora diagnose`; nothing is saved, so that hundreds of runs can be recorded. The forward passes are
in evaluation mode, without gradients and random numbers: the run's results do not change.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from nalora.control.hooks import wrap_method
from nalora.diagnostics.lockstep import Gates, Lockstep, on_device
from nalora.diagnostics.measures import movement, token_slices
from nalora.diagnostics.sites import GateSite, find_sites
from nalora.runs.folder import MOVEMENT
from nalora.runs.inputs import RunInputs

MEASURES = ("D_sel", "flip", "kappa_drift", "severe")
UPDATE_TO_WEIGHT = "update_to_weight"
# About 3,000 tokens of GSM8K: their gates take 0.3 GB for SmolLM2-135M in bfloat16, and shares of gates are exact to
# four digits.
_EXAMPLES = 16
_ELEMENTS = 1 << 20


class GateMovement(TrainerCallback):  # type: ignore[misc]
    """Adds ``movement/…`` to the log of the chosen steps, which are logged whatever `log_every` is.

    A run that is resumed after its first step records nothing: the gates before that step are lost.
    """

    def __init__(self, steps: Collection[int], model: nn.Module, inputs: RunInputs) -> None:
        self.steps, self.model = frozenset(steps), model
        rows = [inputs.dataset[index] for index in range(min(_EXAMPLES, len(inputs.dataset)))]
        self.batch = dict(inputs.collator(rows))
        if not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
            self.batch.pop("labels", None)  # a decoder would only compute a loss from them
        self.sites = find_sites(model)
        self.start: list[tuple[GateSite, Tensor]] = []
        self.measured: dict[str, float] = {}

    def install(self, trainer: Any) -> None:
        """Measure at the trainer's steps, and add the measures to the rows that it logs."""
        trainer.add_callback(self)
        wrap_method(trainer, "log", before=self._add_to_log)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Keep the gates before the first step."""
        if state.global_step == 0:
            self.start = self._gates()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """Measure after a chosen step, and let the trainer log it; the last of them releases the gates."""
        if self.start and state.global_step in self.steps:
            self.measured = self._movement() | update_to_weight(self.model)
            control.should_log = True
            if state.global_step >= max(self.steps):
                self.start = []
        return control

    def _add_to_log(self, logs: dict[str, float], *_: Any, **__: Any) -> None:
        if "loss" in logs:
            logs |= {MOVEMENT + name: value for name, value in self.measured.items()}
            self.measured = {}

    def _gates(self) -> list[tuple[GateSite, Tensor]]:
        """Return z of the real tokens, [tokens, channels], in the order in which the model computes its gates."""
        gates: list[tuple[GateSite, Tensor]] = []

        def keep(index: int, seen: Sequence[Gates], mask: Tensor | None) -> None:
            z = seen[0].z
            gates.extend((self.sites[index], real) for (real,) in token_slices([z], mask, z.numel()))

        with Lockstep([self.model], self.sites) as lockstep:
            lockstep.run(on_device(self.batch, self.model), keep)
        return gates

    @torch.no_grad()
    def _movement(self) -> dict[str, float]:
        """Return the means over tokens, channels and blocks since the start; those that are not finite are left out."""
        sums: dict[str, list[float]] = {name: [] for name in MEASURES}
        for (site, before), (_, after) in zip(self.start, self._gates(), strict=True):
            parts = [
                movement(first, second, site.activation, site.thresholds)
                for first, second in token_slices([before, after], None, _ELEMENTS)
            ]
            of_block = sum(parts[1:], parts[0]).means()
            for name, values in sums.items():
                if (value := of_block[name]) is not None:
                    values.append(value)
        means = {name: statistics.fmean(values) for name, values in sums.items() if values}
        return {name: value for name, value in means.items() if math.isfinite(value)}


@torch.no_grad()
def update_to_weight(model: nn.Module) -> dict[str, float]:
    """Return the mean over adapted layers of ‖ΔW‖/‖W‖, the adapter's part of the weight over the base's.

    Empty if PEFT has no layers that say what they add to their weight.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    ratios: list[float] = []
    for layer in model.modules():
        if isinstance(layer, BaseTunerLayer) and hasattr(layer, "get_delta_weight"):
            weight: Any = layer.get_base_layer().weight
            change = sum(layer.get_delta_weight(name) for name in layer.active_adapters)
            ratios.append(float(torch.as_tensor(change).float().norm() / weight.float().norm()))
    mean = statistics.fmean(ratios) if ratios else math.nan
    return {UPDATE_TO_WEIGHT: mean} if math.isfinite(mean) else {}
