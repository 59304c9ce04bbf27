"""Python values as JSON between the test harness and the program: plain data is copied, other objects are referenced.

Pickle is not safe here. What the program sends is hostile, and even an unpickler restricted to harmless classes can
be made to set an always-true `__eq__` on one of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

# (name, classes, arguments to send, function that makes the value from them)
_SCALARS: tuple[tuple[str, Any, Callable[[Any], list[Any]], Callable[..., Any]], ...] = (
    ("int", int, lambda value: [hex(value)], lambda digits: int(digits, 16)),
    ("complex", complex, lambda value: [value.real, value.imag], complex),
    ("bytes", (bytes, bytearray), lambda value: [value.hex()], bytes.fromhex),
    ("range", range, lambda value: [value.start, value.stop, value.step], range),
    ("decimal", Decimal, lambda value: [str(value)], Decimal),
    ("fraction", Fraction, lambda value: [str(value)], Fraction),
)
_CONTAINERS: dict[str, type[Any]] = {kind.__name__: kind for kind in (dict, list, tuple, set, frozenset, deque)}


def encode(value: Any, refer: Callable[[Any], int]) -> Any:
    """Return the value as JSON data; `refer` returns a number for an object that is not plain data.

    A subclass is sent as the plain class whose equality it shares: a `Counter` as a dict, a named tuple as a tuple.
    Raises a RecursionError if the value contains itself.
    """
    if value is None or isinstance(value, (bool, str, float)):
        return value
    for name, classes, arguments, _ in _SCALARS:
        if isinstance(value, classes):
            return [name, *arguments(value)]
    for name, kind in _CONTAINERS.items():
        if isinstance(value, kind):
            return [name, [encode(item, refer) for item in (value.items() if kind is dict else value)]]
    return ["object", refer(value)]


def decode(data: Any, find: Callable[[int], Any]) -> Any:
    """Return the value that was encoded; `find` returns the object that a number refers to.

    Raises a ValueError, TypeError or RecursionError if the data is not a result of `encode`.
    """
    if data is None or isinstance(data, (bool, str, float)):
        return data
    if not isinstance(data, list) or not data:
        raise ValueError("not an encoded value")
    tag, *content = data
    for name, _, _, make in _SCALARS:
        if tag == name:
            return make(*content)
    if tag == "object":
        return find(content[0])
    if tag not in _CONTAINERS:
        raise ValueError(f"not an encoded value: {str(tag)[:50]!r}")
    return _CONTAINERS[tag](decode(item, find) for item in content[0])
