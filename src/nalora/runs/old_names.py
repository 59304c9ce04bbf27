"""Settings of earlier versions: files that name them are still read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nalora.config import NALoRAConfig

# `nalora diagnose` compares snapshots after training, so nothing has to be compared during it.
DELETED = frozenset({"diagnose_every", "probe_size"})
# Measured, and slower than kernels="fused", which also fuses the adapters.
_DELETED_VALUES = {("kernels", "fused-activation"): "fused"}


def current(options: Mapping[Any, Any]) -> dict[Any, Any]:
    """The settings of a file without the deleted ones, and with other values in place of the deleted ones."""
    kept = {key: value for key, value in options.items() if key not in DELETED}
    return kept | {key: new for (key, old), new in _DELETED_VALUES.items() if kept.get(key) == old}


def completed(options: Mapping[Any, Any]) -> dict[Any, Any]:
    """The settings of an earlier version's run.yaml as this version would write it: NA-LoRA has more settings now."""
    control = NALoRAConfig().to_dict() if "keep_ratio" in options else {}
    return {**current(options), **{name: value for name, value in control.items() if name not in options}}


def in_key(options: Mapping[Any, Any]) -> dict[str, Any]:
    """What deleted settings add to the key of a run, so that runs of an earlier version are found in their store."""
    size = options.get("probe_size", 64)
    values = {key: old for key, old in _DELETED_VALUES if options.get(key) == old}
    return values if size == 64 else {**values, "probe_size": size}
