"""Training methods by name, behind one interface. Each module with METHODS adds its own, and so can a user's file."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from nalora.errors import NALoRAError, did_you_mean
from nalora.files import python_files
from nalora.methods import peft_registry, peft_tuners
from nalora.methods.method import Adapter, Method, Start

__all__ = ["Adapter", "Method", "Start", "costs", "get", "measured_steps", "names"]


@functools.cache
def _known() -> dict[str, type[Method]]:
    """Return the methods in METHODS of every module of this package, by name."""
    return python_files.scan(__name__, __path__, "METHODS")


def names() -> list[str]:
    """Return the names of all methods of this package."""
    return sorted(_known())


def get(name: str) -> type[Method]:
    """Return the method `name`, a tuner of PEFT (``peft/gralora``), or a method of a Python file.

    ``file.py`` is the first entry of the file's METHODS, ``file.py:lora-fa`` the entry named lora-fa.
    Raises NALoRAError if there is no such method.
    """
    if python_files.split(name):
        method: type[Method] = python_files.entry("method", name, "METHODS")
        return method
    if name.startswith(peft_registry.PREFIX):
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
    """Return measured step time and memory relative to LoRA, as `benchmarks/methods_page.py` writes them."""
    measured: dict[str, dict[str, float]] = json.loads(Path(__file__).with_name("costs.json").read_text("utf-8"))
    return measured


@functools.cache
def measured_steps() -> dict[str, dict[str, Any]]:
    """Return the measured milliseconds of a step and seconds of a start, by setting and method.

    `benchmarks/methods_page.py` writes them from the measured rows.
    """
    measured: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("steps.json").read_text("utf-8"))
    return measured
