"""Training methods by name, behind one interface: each file here holds one, and so may a file of yours."""

from __future__ import annotations

import functools
import json
from pathlib import Path

from nalora.errors import NALoRAError, did_you_mean
from nalora.files import python_files
from nalora.methods import peft_tuners
from nalora.methods.method import Adapter, Method, Start

__all__ = ["Adapter", "Method", "Start", "costs", "get", "names"]


@functools.cache
def _known() -> dict[str, type[Method]]:
    """Every method of this package, found by what its modules call METHODS."""
    return python_files.scan(__name__, __path__, "METHODS")


def names() -> list[str]:
    """Every method by name."""
    return sorted(_known())


def get(name: str) -> type[Method]:
    """The method of that name, a tuner of PEFT's (``peft/gralora``), or one of a Python file's METHODS.

    ``file.py`` is the first of them, ``file.py:lora-fa`` the one of that name.

    Raises:
        NALoRAError: no such method.
    """
    if python_files.split(name):
        method: type[Method] = python_files.entry("method", name, "METHODS")
        return method
    if name.startswith(peft_tuners.PREFIX):
        return peft_tuners.method_of(name)
    if name not in _known():
        raise NALoRAError(
            f"method {name!r}",
            found="no method of that name",
            expected=f"one of {', '.join(names())}, peft/TUNER, or a Python file with METHODS",
            fix=did_you_mean(name, names(), "see `nalora methods`"),
        )
    return _known()[name]


@functools.cache
def costs() -> dict[str, dict[str, float]]:
    """What methods cost as measured, in units of LoRA's step and memory; `benchmarks/methods_page.py` writes it."""
    measured: dict[str, dict[str, float]] = json.loads(Path(__file__).with_name("costs.json").read_text("utf-8"))
    return measured
