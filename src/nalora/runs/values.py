"""Checks of setting values: their types, limits, and the loggers they name."""

from __future__ import annotations

import math
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from nalora.errors import collecting, missing_package, shortened, unknown_name
from nalora.methods import optimizers

# Larger integers fail deep inside a library: torch counts in 64 bits, seeds have 32.
_LARGEST = 2**31 - 1
_TYPE_NAMES = {
    bool: "true or false", int: "a whole number", float: "a number", str: "a text", Path: "a path",
    type(None): "nothing",
}  # fmt: skip
# Limits that the type does not express: (settings, condition, expected).
_LIMITS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("learning_rate alpha epochs", lambda n: n > 0, "a positive number"),
    ("rank batch_size micro_batch_size max_length log_every steps train_limit", lambda n: n >= 1, "1 or more"),
    ("weight_decay max_norm save_every save_minutes", lambda n: n >= 0, "0 or more"),
    ("snapshot_every seed validation_size", lambda n: n >= 0, "0 or more"),
    ("dropout", lambda n: 0 <= n < 1, "a number in [0, 1)"),
    ("warmup", lambda n: 0 <= n <= 1, "a share between 0 and 1"),
)
# Layer names only: PEFT also accepts a regular expression, which may contain a comma.
_NAMES_WITH_COMMAS = re.compile(r"[\w.-]+(\s*,\s*[\w.-]+)+")
# Packages whose name on PyPI differs from the logger's name in transformers.
_LOGGER_PACKAGES = {"azure_ml": "azureml-mlflow", "comet_ml": "comet-ml", "flyte": "flytekit"}


def converted(key: str, value: Any, hint: Any, problems: list[str]) -> Any:
    """Return the value as the setting's type (YAML reads 1e-4 as a string); append to `problems` if it does not fit."""
    choices = _choices(hint)
    is_int = isinstance(value, int) and not isinstance(value, bool)
    for choice in choices:
        arguments, origin = typing.get_args(choice), typing.get_origin(choice)
        if (
            choice is Any
            or (choice in (bool, type(None)) and isinstance(value, choice))
            or (choice is int and is_int and abs(value) <= _LARGEST)
            or (choice in (str, Path) and isinstance(value, str))
            or (origin is Literal and value in arguments)
        ):
            return value
        if origin is Literal and value is False and "off" in arguments:
            return "off"  # which YAML reads as false
        if choice is float and (number := _finite(value)) is not None:
            return number
        if list in (choice, origin) and isinstance(value, list):
            item_problems: list[str] = []
            items = [converted(key, item, arguments[0] if arguments else Any, item_problems) for item in value]
            if len(choices) == 1:
                problems += item_problems
            if not item_problems or len(choices) == 1:
                return items
        if _is_mapping(choice) and isinstance(value, dict):
            kind = arguments[1] if arguments else Any
            return {name: converted(f"{key}.{name}", item, kind, problems) for name, item in value.items()}
    expected = described_type(hint)
    if int in choices and is_int:
        expected += f" of at most {_LARGEST}"
    problems.append(f"{key}: {shortened(repr(value))}, expected {expected}")
    return value


def described_type(hint: Any) -> str:
    """Return a setting's type in words."""
    return " or ".join(map(_description, _choices(hint)))


def takes_mapping(hint: Any) -> bool:
    """Return whether a setting of this type takes `key: value` pairs."""
    return any(map(_is_mapping, _choices(hint)))


def _choices(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def _is_mapping(choice: Any) -> bool:
    return choice is dict or typing.get_origin(choice) in (dict, Mapping)


def _finite(value: Any) -> float | None:
    """Return a finite number, parsed from a string if needed; otherwise None."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _description(choice: Any) -> str:
    arguments = typing.get_args(choice)
    if typing.get_origin(choice) is Literal:
        return "one of " + ", ".join(map(str, arguments))
    if _is_mapping(choice):
        return "`key: value` pairs"
    items = {int: "whole numbers", float: "numbers"}.get(arguments[0] if arguments else str, "names")
    return _TYPE_NAMES.get(choice, f"a list of {items}")


def limit_problems(values: Mapping[str, Any]) -> list[str]:
    """Return a sentence for every value, or pair of values, with which no run can start.

    Values of the wrong type are skipped: `converted` reports them.
    """
    problems = [
        f"{name}: {shortened(repr(values[name]))}, expected {expected}"
        for names, holds, expected in _LIMITS
        for name in names.split()
        if isinstance(values.get(name), int | float) and not holds(values[name])
    ]
    if isinstance(optimizer := values.get("optimizer"), str):
        with collecting(problems):
            optimizers.refuse_unknown(optimizer)
    if isinstance(report_to := values.get("report_to"), str | list):
        with collecting(problems):
            refuse_unknown_loggers(report_to)
    modules = values.get("target_modules")
    if modules == [] and not values.get("target_parameters"):
        problems.append("target_modules: an empty list, expected names of layers (or all-linear)")
    if isinstance(modules, str) and _NAMES_WITH_COMMAS.fullmatch(modules):
        names = ", ".join(name.strip() for name in modules.split(","))
        problems.append(
            f"target_modules: {shortened(repr(modules))}, expected a list of names: [{names}]"
            f" (on the command line 'target_modules=[{names.replace(' ', '')}]')"
        )
    batch, micro = values.get("batch_size", 32), values.get("micro_batch_size")
    if isinstance(batch, int) and isinstance(micro, int) and micro >= 1 and batch % micro:
        problems.append(f"batch_size: {batch} is not a multiple of micro_batch_size, {micro}")
    if values.get("fused_adapters") is True and values.get("kernels") == "fused":
        problems.append("fused_adapters: true with kernels: fused, which also fuses them; remove one of the two")
    return problems


def _loggers(report_to: str | Sequence[str]) -> list[str]:
    """Return the loggers that transformers does not choose itself: none for ``none`` and ``all``."""
    names = [report_to] if isinstance(report_to, str) else report_to
    loggers = [name for name in names if isinstance(name, str) and name != "none"]
    return [] if loggers == ["all"] else loggers


def refuse_unknown_loggers(report_to: str | Sequence[str]) -> None:
    """Raise NALoRAError for a logger that transformers does not have."""
    if not (loggers := _loggers(report_to)):
        return  # without importing transformers, which takes seconds
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    for name in (name for name in loggers if name not in INTEGRATION_TO_CALLBACK):
        known, where = ["none", "all", *INTEGRATION_TO_CALLBACK], f"report_to: {shortened(name)}"
        raise unknown_name(where, "no logger of that name", name, known, "leave report_to out")


def refuse_missing_loggers(report_to: str | Sequence[str]) -> None:
    """Raise NALoRAError for a logger that is not installed, before the model is loaded.

    Not part of checking settings: a run that was logged on one machine can be evaluated on another.
    """
    if not (loggers := _loggers(report_to)):
        return
    from transformers.integrations import integration_utils

    available = integration_utils.get_available_reporting_integrations()
    for name in (name for name in loggers if name not in available):
        try:  # transformers does not list every logger; the callbacks of the others raise without their package
            integration_utils.INTEGRATION_TO_CALLBACK[name]()
        except Exception as error:
            package = _LOGGER_PACKAGES.get(name, name)
            instead = ", or leave report_to out"
            raise missing_package(f"report_to: {name}", package, "to log with", instead=instead) from error
