"""The controls of NA-LoRA that acted in a run of version 0.1, from its files.

0.1 logged the computed mask and step scales under the names of the applied ones, whether they acted or not. Which of
them acted follows from its settings (run.yaml) and the activations of its blocks (the first line of gates.jsonl).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nalora.activations import Activation, clamped, get
from nalora.control.metrics import FOLLOWED, NEUTRAL, unapplied
from nalora.control.plan import SWITCHED_OFF, why_not_scaled
from nalora.errors import NALoRAError

# The names of projections in the Llama family: one that is missing in target_modules has no adapter. In other families
# the names do not show which layer is the gate.
_PROJECTION_NAMES = {"gate": {"gate_proj", "gate_up_proj"}, "up": {"up_proj", "gate_up_proj"}, "down": {"down_proj"}}


@dataclass(frozen=True)
class RecordedBlock:
    """The controls that acted on one block.

    Attributes:
        mask_off: why the mask did not act; empty where it did.
        scaling_off: why no step was scaled; empty where steps were.
        unapplied: the measures whose computed value was not applied.
    """

    mask_off: str
    scaling_off: str
    unapplied: frozenset[str]


def recorded_block(settings: Mapping[str, Any], activation: str, *, has_regimes: bool) -> RecordedBlock:
    """Return the controls that acted on a block of a run of 0.1.

    Args:
        settings: the run's run.yaml.
        activation: the name of the block's activation.
        has_regimes: whether the run recorded thresholds for it.
    """
    known = named_activation(activation)
    scaling_off = why_not_scaled(
        activation,
        has_regimes=has_regimes,
        degenerate=known is not None and known.degenerate_in_paper,
        switched_on=_is_on(settings, "scaling"),
        regimes=str(settings.get("regimes", "paper")),
    )
    adapted = _adapted_projections(settings.get("target_modules"), activation)
    mask_off = "" if "gate" in adapted else "the gate has no adapter"
    if not _is_on(settings, "mask"):
        mask_off = SWITCHED_OFF
    preserve_mean = bool(settings.get("preserve_mean")) or settings.get("method") == "na-lora-mean"
    off = unapplied(() if scaling_off else adapted, mask=not mask_off, preserve_mean=preserve_mean)
    return RecordedBlock(mask_off, scaling_off, off)


def applied_row(row: Mapping[str, Any], blocks: Sequence[RecordedBlock]) -> dict[str, Any]:
    """Return a row of 0.1's gates.jsonl with the applied values, and the others as ``followed_…``.

    A row with the ``followed_…`` value of a measure was written by a later version, as in a resumed run.
    """
    result = dict(row)
    for name, neutral in NEUTRAL.items():
        values = row.get(name)
        off = [name in block.unapplied for block in blocks]
        if values is None or FOLLOWED[name] in row or not any(off):
            continue
        result[name] = [neutral if is_off else value for value, is_off in zip(values, off, strict=True)]
        result[FOLLOWED[name]] = [value if is_off else None for value, is_off in zip(values, off, strict=True)]
    return result


def named_activation(name: str) -> Activation | None:
    """Return the activation of a name in a run's files, including clamped ones (`silu≤7`); None if it is unknown."""
    inner, _, bound = name.partition("≤")
    try:
        activation = get(inner)
        return clamped(activation, float(bound)) if bound and math.isfinite(float(bound)) else activation
    except (NALoRAError, ValueError):
        return None


def _is_on(settings: Mapping[str, Any], control: str) -> bool:
    """Return a control's setting; every method of 0.1 wrote it to run.yaml, so the default is for damaged files."""
    return bool(settings.get(control, settings.get("method") != "na-lora-off"))


def _adapted_projections(target_modules: Any, activation: str) -> set[str]:
    """Return the projections with an adapter, by name; all of them if that is unknown."""
    if isinstance(target_modules, list) and activation == "silu":
        names = {str(target).rpartition(".")[2] for target in target_modules}
        if adapted := {role for role, known in _PROJECTION_NAMES.items() if known & names}:
            return adapted
    return set(_PROJECTION_NAMES)
