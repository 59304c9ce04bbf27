"""A value out of a YAML file as the type that its setting has."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from nalora.errors import shortened

# Beyond these, what is built from a setting fails deep inside a library: torch counts in 64 bits, seeds in 32.
_MOST = 2**31 - 1


def converted(key: str, value: Any, hint: Any, problems: list[str]) -> Any:
    """The value as the setting's type; YAML reads 1e-4 as a text.

    Args:
        key: the setting's name.
        value: what was given.
        hint: the setting's type.
        problems: gets a sentence where the value is not of it.
    """
    choices = _choices(hint)
    if value is None and type(None) in choices:
        return None
    for choice in choices:
        if typing.get_origin(choice) is Literal and value in typing.get_args(choice):
            return value
        if choice is bool and isinstance(value, bool):
            return value
        if choice is int and isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _MOST:
            return value
        if choice is float and (number := _number(value)) is not None:
            return number
        if choice in (str, Path) and isinstance(value, str):
            return value
        if list in (choice, typing.get_origin(choice)) and isinstance(value, list):
            inside: list[str] = []
            (kind,) = typing.get_args(choice) or (Any,)
            items = [converted(key, item, kind, inside) for item in value]
            if len(choices) == 1:
                problems += inside
            if not inside or len(choices) == 1:
                return items
        if _is_of_pairs(choice) and isinstance(value, dict):
            _, kind = typing.get_args(choice) or (Any, Any)
            return {name: converted(f"{key}.{name}", item, kind, problems) for name, item in value.items()}
        if choice is Any:
            return value
    expected = " or ".join(_in_words(choice) for choice in choices)
    if int in choices and isinstance(value, int) and not isinstance(value, bool):
        expected += f" of at most {_MOST}"
    problems.append(f"{key}: {shortened(repr(value))}, expected {expected}")
    return value


def takes_pairs(hint: Any) -> bool:
    """Whether a setting of this type takes `key: value` pairs."""
    return any(_is_of_pairs(choice) for choice in _choices(hint))


def _choices(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def _is_of_pairs(choice: Any) -> bool:
    return choice is dict or typing.get_origin(choice) in (dict, Mapping)


def _number(value: Any) -> float | None:
    """A finite number, also out of a text; else None."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _in_words(choice: Any) -> str:
    if typing.get_origin(choice) is Literal:
        return "one of " + ", ".join(map(str, typing.get_args(choice)))
    words = {
        bool: "true or false", int: "a whole number", float: "a number", str: "a text",
        Path: "a path", type(None): "nothing",
    }  # fmt: skip
    if _is_of_pairs(choice):
        return "`key: value` pairs"
    kind = {int: "whole numbers", float: "numbers"}.get(next(iter(typing.get_args(choice)), str), "names")
    return words.get(choice, f"a list of {kind}")
