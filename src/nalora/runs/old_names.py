"""Settings of earlier versions: files that name them are still read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# `nalora diagnose` compares snapshots after training, so nothing has to be compared during it.
DELETED = frozenset({"diagnose_every", "probe_size"})


def current(options: Mapping[Any, Any]) -> dict[Any, Any]:
    """The settings of a file without those that no longer exist."""
    return {key: value for key, value in options.items() if key not in DELETED}


def in_key(options: Mapping[Any, Any]) -> dict[str, Any]:
    """What deleted settings add to the key of a run, so that runs of an earlier version are found in their store."""
    size = options.get("probe_size", 64)
    return {} if size == 64 else {"probe_size": size}
