"""The hook that a deep copy or a pickle of a model gets in place of an active one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def inert_hook() -> Callable[..., None]:
    """Return a hook that does nothing; for the `__reduce__` of hooks that hold the state of one model."""
    return _ignore


def _ignore(*_: Any) -> None:
    """Do nothing."""
