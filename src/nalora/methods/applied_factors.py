"""The mean factors that an NA-LoRA run applied to its steps, from the run's folder: what `lora-scaled` takes over.

A factor that the run only followed (of a control that was switched off, step scaling of GELU under the paper's regimes,
the mask's mean where that was preserved) multiplied nothing, and counts as 1.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nalora.control.recorded import RecordedBlock, applied_row, recorded_block
from nalora.errors import NALoRAError

FACTORS = ("scale_gate", "scale_up", "scale_down", "mask_mean")
_PREFIX = "nalora/"


def mean_applied_factors(folder: Path) -> dict[str, float]:
    """By name, weighted by the length of the way that each logged row stands for.

    Raises:
        NALoRAError: no metrics of NA-LoRA there, or none that tell whether mask and step scales acted.
    """
    file = folder / "metrics.jsonl"
    # null stands for a number that was not finite
    logged = [row for row in _rows(file) if all(isinstance(row.get(_PREFIX + name), int | float) for name in FACTORS)]
    if not logged:
        raise NALoRAError(
            f"like: {folder}",
            found="no metrics of NA-LoRA" if file.is_file() else "no metrics.jsonl",
            expected="the folder of a finished NA-LoRA run",
            fix="train one first, with method=na-lora",
        )
    # 0.1 did not log on which share of the blocks a control acts; rows that have it hold applied values.
    known = all(_PREFIX + "scaling_acts" in row for row in logged)
    values = [{name: row[_PREFIX + name] for name in FACTORS} for row in logged]
    if not known:
        values = _of_an_older_run(folder, logged, values)
    weights = _weights(logged)
    return {
        name: sum(weight * row[name] for weight, row in zip(weights, values, strict=True)) / sum(weights)
        for name in FACTORS
    }


def _of_an_older_run(
    folder: Path, logged: Sequence[Mapping[str, Any]], followed: Sequence[Mapping[str, float]]
) -> list[dict[str, float]]:
    """What 0.1 applied: its metrics have the followed values; its settings and activations say which acted."""
    blocks = _recorded_blocks(folder)
    if blocks is None:
        raise NALoRAError(
            f"like: {folder}",
            found="metrics of version 0.1 without the run.yaml and the gates.jsonl that say which controls acted",
            expected="the whole folder of the run",
            fix="give gate_scale, up_scale, down_scale and mask_mean in place of like, 1 for what did not act",
        )
    by_step = {row.get("step"): applied_row(row, blocks) for row in _rows(folder / "gates.jsonl")[1:]}
    result = []
    for row, values in zip(logged, followed, strict=True):
        if _PREFIX + "scaling_acts" in row:  # logged by a later version, which resumed the run
            result.append(dict(values))
            continue
        applied = {}
        for name in FACTORS:
            off = sum(name in block.unapplied for block in blocks)
            if off in (0, len(blocks)):
                applied[name] = 1.0 if off else values[name]
            else:
                by_block = [each for each in by_step.get(row["step"], {}).get(name) or () if each is not None]
                # Without the blocks' own values those that were scaled have the mean of all.
                by_block = by_block or [1.0] * off + [values[name]] * (len(blocks) - off)
                applied[name] = sum(by_block) / len(by_block)
        result.append(applied)
    return result


def _recorded_blocks(folder: Path) -> list[RecordedBlock] | None:
    import yaml

    try:
        settings = yaml.safe_load((folder / "run.yaml").read_text(encoding="utf-8"))
        header = _rows(folder / "gates.jsonl")[0]
        bounds = header.get("thresholds") or [None] * len(header["blocks"])
        return [
            recorded_block(settings, str(activation), has_regimes=pair is not None)
            for activation, pair in zip(header["activations"], bounds, strict=True)
        ]
    except (OSError, yaml.YAMLError, LookupError, TypeError, ValueError, AttributeError):
        return None


def _rows(file: Path) -> list[dict[str, Any]]:
    if not file.is_file():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]


def _weights(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """How much of the way a row stands for: its learning rate times the steps since the row before.

    In warmup the mask is still whole and the steps are small; a plain mean over rows would count them as any other.
    """
    steps = [row["step"] for row in rows]
    weights = [
        row["learning_rate"] * (step - before) for row, before, step in zip(rows, [0, *steps], steps, strict=False)
    ]
    return weights if sum(weights) > 0 else [1.0] * len(rows)
