"""Python values as JSON between the judge and the program: plain data travels, everything else is only referred to.

Pickle will not do. What the program sends is hostile, and even an unpickler that only knows harmless classes can be
told to put an always-true `__eq__` on one of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

# (name, classes, what of it travels, what makes it again)
_PLAIN: tuple[tuple[str, Any, Callable[[Any], list[Any]], Callable[..., Any]], ...] = (
    ("int", int, lambda value: [hex(value)], lambda digits: int(digits, 16)),
    ("complex", complex, lambda value: [value.real, value.imag], complex),
    ("bytes", (bytes, bytearray), lambda value: [value.hex()], bytes.fromhex),
    ("range", range, lambda value: [value.start, value.stop, value.step], range),
    ("decimal", Decimal, lambda value: [str(value)], Decimal),
    ("fraction", Fraction, lambda value: [str(value)], Fraction),
)
_CONTAINERS: dict[str, type[Any]] = {kind.__name__: kind for kind in (list, tuple, set, frozenset, deque)}


def encode(value: Any, refer: Callable[[Any], int]) -> Any:
    """The value as what `json` can write; `refer` gives the number of a value that is no plain data.

    Subclasses travel as the plain class whose equality they share: a `Counter` as a dict, a named tuple as a tuple.

    Raises:
        RecursionError: the value contains itself.
    """
    if value is None or isinstance(value, (bool, str, float)):
        return value
    for name, kind, parts, _ in _PLAIN:
        if isinstance(value, kind):
            return [name, *parts(value)]
    if isinstance(value, dict):
        return ["dict", [[encode(key, refer), encode(each, refer)] for key, each in value.items()]]
    for name, kind in _CONTAINERS.items():
        if isinstance(value, kind):
            return [name, [encode(each, refer) for each in value]]
    return ["object", refer(value)]


def decode(text: Any, find: Callable[[int], Any]) -> Any:
    """The value that was encoded; `find` gives what a number refers to.

    Raises:
        ValueError, TypeError, RecursionError: this is nothing that `encode` writes.
    """
    if text is None or isinstance(text, (bool, str, float)):
        return text
    if not isinstance(text, list) or not text:
        raise ValueError("no encoded value")
    tag, *content = text
    for name, _, _, made_from in _PLAIN:
        if tag == name:
            return made_from(*content)
    if tag == "dict":
        return {decode(key, find): decode(each, find) for key, each in content[0]}
    if tag == "object":
        return find(content[0])
    if tag not in _CONTAINERS:
        raise ValueError(f"no encoded value: {str(tag)[:50]!r}")
    return _CONTAINERS[tag](decode(each, find) for each in content[0])
