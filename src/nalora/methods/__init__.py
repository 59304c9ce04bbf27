"""Training methods by name, behind one interface."""

from __future__ import annotations

import difflib
from importlib import import_module

from nalora.errors import NALoRAError
from nalora.methods.method import Method

__all__ = ["Method", "get", "names"]

_MODULES = {"lora": "lora", "full": "full", "na-lora": "na_lora"}


def names() -> list[str]:
    """Every method by name."""
    return [*_MODULES]


def get(name: str) -> type[Method]:
    """The method of that name.

    Raises:
        NALoRAError: no such method.
    """
    if name not in _MODULES:
        close = difflib.get_close_matches(name, names(), 1)
        raise NALoRAError(
            f"method {name!r}",
            found="no method of that name",
            expected=f"one of {', '.join(names())}",
            fix=f"did you mean {close[0]!r}?" if close else "see `nalora methods`",
        )
    method: type[Method] = import_module(f"nalora.methods.{_MODULES[name]}").METHOD
    return method
