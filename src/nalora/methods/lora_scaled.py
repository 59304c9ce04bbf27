"""LoRA at NA-LoRA's mean step: a control whose factors do not depend on channel, layer or time.

The factors can be read from an NA-LoRA run. A factor that the run only observed (of a control that was switched off,
step scaling of GELU under the paper's regimes, the mask's mean where that was preserved) counts as 1.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from nalora.config import PROJECTIONS
from nalora.errors import NALoRAError
from nalora.methods.lora import LoRA
from nalora.methods.method import Adapter, Start, check_positive
from nalora.methods.optimizers import named_optimizer

if TYPE_CHECKING:
    from nalora.control.recorded import RecordedBlock

# Each factor's name in a run's metrics by its setting.
_FACTORS = {f"{name}_scale": f"scale_{name}" for name in PROJECTIONS} | {"mask_mean": "mask_mean"}
_PREFIX = "nalora/"


@dataclass(frozen=True)
class LoRAScaled(LoRA):
    """LoRA whose FFN adapters have constant multiples of the learning rate.

    Args:
        like: folder of an NA-LoRA run whose mean applied step scales and mean mask are used, steps weighted by their
            learning rate. Factors that were not applied count as 1.
        gate_scale: multiple for the gate projection.
        up_scale: multiple for the up projection.
        down_scale: multiple for the down projection.
        mask_mean: further multiple for the gate's B.
    """

    name = "lora-scaled"
    title = "LoRA at learning rate × NA-LoRA's mean factors"
    reference = "control"

    like: str | None = None
    gate_scale: float = 1.0
    up_scale: float = 1.0
    down_scale: float = 1.0
    mask_mean: float = 1.0

    def __post_init__(self) -> None:
        check_positive(self, *_FACTORS)
        has_factors = any(getattr(self, name) != 1.0 for name in _FACTORS)
        if has_factors == (self.like is not None):
            raise NALoRAError(
                "method 'lora-scaled'",
                found="both `like` and factors" if has_factors else "neither `like` nor a factor other than 1",
                expected="one of them",
                fix="give like=FOLDER of an NA-LoRA run, or gate_scale, up_scale, down_scale and mask_mean",
            )

    def prepare(self, model: nn.Module, adapter: Adapter, start: Start) -> nn.Module:
        """Prepare as LoRA does, after reading the factors."""
        self.factors()
        return super().prepare(model, adapter, start)

    def optimizer(self, trainer: Any) -> Optimizer:
        """Return the run's optimizer with a parameter group for each multiple."""
        multiples = multiples_of(trainer.model, self.factors())
        rate, decay = trainer.args.learning_rate, trainer.args.weight_decay
        groups: dict[float, list[nn.Parameter]] = {}
        for parameter in trainer.model.parameters():
            if parameter.requires_grad:
                groups.setdefault(multiples.get(parameter, 1.0), []).append(parameter)
        return named_optimizer(
            trainer, [{"params": group, "lr": m * rate, "weight_decay": decay} for m, group in groups.items()]
        )

    def factors(self) -> LoRAScaled:
        """Return the method with its multiples, read from the other run if `like` names one.

        Raises NALoRAError if there is no such run, no metrics of NA-LoRA in it, or no factor other than 1.
        """
        if self.like is None:
            return self
        means = mean_applied_factors(Path(self.like))
        if all(value == 1.0 for value in means.values()):
            raise NALoRAError(
                f"like: {self.like}",
                found="a run in which every mean factor is 1: neither mask nor step scales changed the mean step",
                expected="a run whose mask or step scales were applied",
                fix="use method=lora, which is the same",
            )
        return dataclasses.replace(self, like=None, **{name: means[logged] for name, logged in _FACTORS.items()})


def multiples_of(model: nn.Module, factors: LoRAScaled) -> dict[nn.Parameter, float]:
    """Return the multiple of the learning rate of each FFN adapter parameter.

    If gate and up are one layer, its A and B get the mean of both, since a parameter has one learning rate.
    """
    from nalora.control.blocks import find_blocks
    from nalora.control.peft_layers import active_adapters

    multiples: dict[nn.Parameter, float] = {}
    for block in find_blocks(model).blocks:
        scales: dict[nn.Parameter, list[float]] = {}
        for name, projection in block.projections.items():
            scale = getattr(factors, f"{name}_scale")
            for adapter in active_adapters(projection.module):
                scales.setdefault(adapter.a, []).append(scale)
                scales.setdefault(adapter.b, []).append(scale * (factors.mask_mean if name == "gate" else 1.0))
        multiples |= {parameter: sum(values) / len(values) for parameter, values in scales.items()}
    return multiples


def mean_applied_factors(folder: Path) -> dict[str, float]:
    """Return the mean factors of an NA-LoRA run by their names in its metrics.

    A row counts by its learning rate times the steps since the row before: in warmup the mask is still all ones and
    steps are small. Raises NALoRAError if there are no metrics of NA-LoRA or if they do not show what was applied.
    """
    file = folder / "metrics.jsonl"
    names = [_PREFIX + name for name in _FACTORS.values()]
    # null is a value that was not finite
    logged = [row for row in _rows(file) if all(isinstance(row.get(name), int | float) for name in names)]
    if not logged:
        raise NALoRAError(
            f"like: {folder}",
            found="no metrics of NA-LoRA" if file.is_file() else "no metrics.jsonl",
            expected="the folder of a finished NA-LoRA run",
            fix="train one first, with method=na-lora",
        )
    values = [{name: row[_PREFIX + name] for name in _FACTORS.values()} for row in logged]
    # 0.1 did not log the share of the blocks to which a control is applied; rows that have it hold applied values.
    if not all(_has_applied_values(row) for row in logged):
        values = _applied_in_0_1(folder, logged, values)
    steps = [row["step"] for row in logged]
    weights = [row["learning_rate"] * (row["step"] - last) for row, last in zip(logged, [0, *steps], strict=False)]
    if not sum(weights) > 0:
        weights = [1.0] * len(logged)
    return {
        name: sum(weight * row[name] for weight, row in zip(weights, values, strict=True)) / sum(weights)
        for name in _FACTORS.values()
    }


def _has_applied_values(row: Mapping[str, Any]) -> bool:
    return _PREFIX + "scaling_acts" in row


def _applied_in_0_1(
    folder: Path, logged: Sequence[Mapping[str, Any]], observed: Sequence[Mapping[str, float]]
) -> list[dict[str, float]]:
    """Return what 0.1 applied: it logged observed values; its settings and activations show which were applied."""
    from nalora.control.recorded import applied_row  # imports PEFT, which `nalora methods` need not wait for

    blocks = _recorded_blocks(folder)
    if blocks is None:
        raise NALoRAError(
            f"like: {folder}",
            found="metrics of version 0.1 without the run.yaml and the gates.jsonl that show which controls acted",
            expected="the whole folder of the run",
            fix="give gate_scale, up_scale, down_scale and mask_mean in place of like, 1 for what did not act",
        )
    by_step = {row.get("step"): applied_row(row, blocks) for row in _rows(folder / "gates.jsonl")[1:]}
    result = []
    for row, values in zip(logged, observed, strict=True):
        applied = dict(values)
        if not _has_applied_values(row):  # else logged by a later version, which resumed the run
            for name in applied:
                off = sum(name in block.unapplied for block in blocks)
                by_block = [value for value in by_step.get(row["step"], {}).get(name) or () if value is not None]
                if off in (0, len(blocks)):
                    by_block = [1.0 if off else values[name]]
                elif not by_block:
                    # Without the values per block, the scaled blocks get the mean of all.
                    by_block = [1.0] * off + [values[name]] * (len(blocks) - off)
                applied[name] = sum(by_block) / len(by_block)
        result.append(applied)
    return result


def _recorded_blocks(folder: Path) -> list[RecordedBlock] | None:
    import yaml

    from nalora.control.recorded import recorded_block

    try:
        settings = yaml.safe_load((folder / "run.yaml").read_text(encoding="utf-8"))
        header = _rows(folder / "gates.jsonl")[0]
        thresholds = header.get("thresholds") or [None] * len(header["blocks"])
        return [
            recorded_block(settings, str(activation), has_regimes=pair is not None)
            for activation, pair in zip(header["activations"], thresholds, strict=True)
        ]
    except (OSError, yaml.YAMLError, LookupError, TypeError, ValueError, AttributeError):
        return None


def _rows(file: Path) -> list[dict[str, Any]]:
    if not file.is_file():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]


METHODS = (LoRAScaled,)
