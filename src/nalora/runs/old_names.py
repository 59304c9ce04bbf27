"""Settings of earlier versions: files that name them are still read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# `nalora diagnose` compares snapshots after the training, so that nothing has to be compared while it runs.
DELETED = frozenset({"diagnose_every", "probe_size"})


def current(given: Mapping[Any, Any]) -> dict[Any, Any]:
    """The settings of a file without those that no longer exist."""
    return {key: value for key, value in given.items() if key not in DELETED}
