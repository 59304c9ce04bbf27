"""Liger's kernels for the length of one training: it replaces names of transformers for the whole process."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from torch import nn


@contextlib.contextmanager
def contained(model: nn.Module) -> Iterator[None]:
    """Give the names back that Liger replaces where the model's class stands.

    Without this every model that the process builds later has Liger's layers: another run, or this one's evaluation.

    Args:
        model: the one that is trained, as it was loaded.
    """
    module: Any = sys.modules[type(model).__module__]
    names = dict(vars(module))
    # Classes keep theirs in a table of their own, to which Liger writes a `forward` that computes the loss.
    forwards = {each: each.__dict__["forward"] for each in names.values() if _has_its_own_forward(each)}
    try:
        yield
    finally:
        for name, value in names.items():
            if vars(module)[name] is not value:
                setattr(module, name, value)
        for each, forward in forwards.items():
            if each.__dict__["forward"] is not forward:
                each.forward = forward


def _has_its_own_forward(value: Any) -> bool:
    return isinstance(value, type) and "forward" in value.__dict__
