"""Settings of earlier versions: run files, stored runs and the command line may still use them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nalora.config import NALoRAConfig

# Removed because `nalora diagnose` compares snapshots after training instead.
_DELETED = ("diagnose_every", "probe_size")
# Removed because kernels="fused" is faster and also fuses the adapters.
_REPLACED_VALUES = {("kernels", "fused-activation"): "fused"}
# Old name: the new name, and the new value of each old one.
_RENAMED = {"too_long": ("overlong", {"cut": "truncate"})}


def renamed(options: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the options under their present names; the present name has precedence if both are given."""
    result = dict(options)
    for old, (new, values) in _RENAMED.items():
        if old in result:
            value = result.pop(old)
            result.setdefault(new, value)
        if isinstance(value := result.get(new), str):
            result[new] = values.get(value, value)
    return result


def current(options: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the options as this version names them, without the deleted ones."""
    present = {key: value for key, value in renamed(options).items() if key not in _DELETED}
    return present | {key: new for (key, old), new in _REPLACED_VALUES.items() if present.get(key) == old}


def problems(options: Mapping[Any, Any]) -> list[str]:
    """Return a sentence for each setting that is given under both its old and its new name."""
    both = ((old, new) for old, (new, _) in _RENAMED.items() if old in options and new in options)
    return [f"{old} and {new}: two names of one setting" for old, new in both]


def completed(options: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the settings of an earlier version's run.yaml with NA-LoRA settings that did not exist then."""
    control = NALoRAConfig().to_dict() if "keep_ratio" in options else {}
    return {**current(options), **{name: value for name, value in control.items() if name not in options}}


def in_key(options: Mapping[Any, Any]) -> dict[str, Any]:
    """Return what deleted settings add to a run's key, so that the runs of an earlier version are found in a store."""
    size = options.get("probe_size", 64)
    values = {key: old for key, old in _REPLACED_VALUES if options.get(key) == old}
    return values if size == 64 else {**values, "probe_size": size}


def as_in_keys(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options under the names that run keys were first made from: keys must not change."""
    result = dict(options)
    for old, (new, values) in _RENAMED.items():
        if new in result:
            value = result.pop(new)
            result[old] = next((before for before, after in values.items() if after == value), value)
    if result.get("fused_adapters") is False:  # the default, before it depended on the device
        del result["fused_adapters"]
    return result
