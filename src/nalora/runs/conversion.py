"""Settings as users write them: ``key=value`` arguments, and values of YAML as the type of their setting.

Without torch, which `nalora launch` would keep in memory next to the program that it runs.
"""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from nalora.errors import NALoRAError, did_you_mean, shortened
from nalora.files import yaml_reader

# Larger integers fail deep inside a library: torch counts in 64 bits, seeds have 32.
_LARGEST = 2**31 - 1
_TYPE_NAMES = {
    bool: "true or false", int: "a whole number", float: "a number", str: "a text", Path: "a path",
    type(None): "nothing",
}  # fmt: skip


class Removed:
    """The value of a setting that the command line removes from the file."""


def key_values(arguments: Sequence[str]) -> dict[str, Any]:
    """Return ``key=value`` arguments of the command line, with values read as YAML and `Removed` for ``key=``.

    Raises:
        NALoRAError: an argument without =, a value that is not YAML, or a key given twice.
    """
    options: dict[str, Any] = {}
    for argument in arguments:
        key, separator, value = argument.partition("=")
        if not separator or not key:
            what = "no name before =" if separator else "no ="
            fix = "write the setting's name first" if separator else f"write {shortened(argument or 'key')}=VALUE"
            raise NALoRAError(shortened(argument), found=what, expected="key=value", fix=fix)
        if key in options:
            twice = f"{shortened(key)} given twice"
            raise NALoRAError(shortened(argument), found=twice, expected="once", fix="keep one of them")
        options[key] = yaml_reader.value(value, shortened(argument)) if value else Removed
    return options


def without_removed(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings except those that the command line removes with ``key=``."""
    return {key: value for key, value in options.items() if value is not Removed}


def converted(key: str, value: Any, hint: Any, problems: list[str]) -> Any:
    """Return the value as the setting's type (YAML reads 1e-4 as a string); append to `problems` if it does not fit."""
    errors: list[NALoRAError] = []
    result = checked(key, value, hint, errors)
    problems += [f"{error.where}: {error.found}, expected {error.expected}" for error in errors]
    return result


def checked(key: str, value: Any, hint: Any, errors: list[NALoRAError]) -> Any:
    """Return the value as `converted` does; append an error, with a fix, for each part of it that does not fit."""
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
            item_errors: list[NALoRAError] = []
            items = [checked(key, item, arguments[0] if arguments else Any, item_errors) for item in value]
            if len(choices) == 1:
                errors += item_errors
            if not item_errors or len(choices) == 1:
                return items
        if _is_mapping(choice) and isinstance(value, dict):
            kind = arguments[1] if arguments else Any
            return {name: checked(f"{key}.{name}", item, kind, errors) for name, item in value.items()}
    expected = described_type(hint)
    if int in choices and is_int:
        expected += f" of at most {_LARGEST}"
    names = [name for choice in choices if typing.get_origin(choice) is Literal for name in typing.get_args(choice)]
    fix = did_you_mean(str(value), map(str, names), "set it to that")
    errors.append(NALoRAError(key, found=shortened(repr(value)), expected=expected, fix=fix))
    return value


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


def described_type(hint: Any) -> str:
    """Return a setting's type in words."""
    return " or ".join(map(_description, _choices(hint)))
