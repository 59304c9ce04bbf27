"""A value out of a YAML file as the type that its setting has."""

from __future__ import annotations

import types
import typing
from typing import Any, Literal


def converted(key: str, value: Any, hint: Any, problems: list[str]) -> Any:
    """The value as the setting's type; YAML reads 1e-4 as a text.

    Args:
        key: the setting's name.
        value: what was given.
        hint: the setting's type.
        problems: gets a sentence where the value is not of it.
    """
    choices = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    if value is None and type(None) in choices:
        return None
    for choice in choices:
        if typing.get_origin(choice) is Literal and value in typing.get_args(choice):
            return value
        if choice is bool and isinstance(value, bool):
            return value
        if choice is int and isinstance(value, int) and not isinstance(value, bool):
            return value
        if choice is float and not isinstance(value, bool):
            try:
                return float(value)
            except (TypeError, ValueError):
                continue
        if choice is str and isinstance(value, str):
            return value
        if list in (choice, typing.get_origin(choice)) and isinstance(value, list):
            inside: list[str] = []
            (kind,) = typing.get_args(choice) or (Any,)
            items = [converted(key, item, kind, inside) for item in value]
            if not inside:
                return items
        if dict in (choice, typing.get_origin(choice)) and isinstance(value, dict):
            return value
        if choice is Any:
            return value
    expected = " or ".join(_in_words(choice) for choice in choices)
    problems.append(f"{key}: {value!r}, expected {expected}")
    return value


def _in_words(choice: Any) -> str:
    if typing.get_origin(choice) is Literal:
        return "one of " + ", ".join(map(str, typing.get_args(choice)))
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", type(None): "nothing"}
    if dict in (choice, typing.get_origin(choice)):
        return "`key: value` pairs"
    kind = {int: "whole numbers", float: "numbers"}.get(next(iter(typing.get_args(choice)), str), "names")
    return words.get(choice, f"a list of {kind}")
