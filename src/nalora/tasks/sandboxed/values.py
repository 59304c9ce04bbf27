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

_CONTAINERS: dict[str, type[Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": deque,
}


def encode(value: Any, refer: Callable[[Any], int]) -> Any:
    """The value as what `json` can write; `refer` gives the number of a value that is no plain data.

    Subclasses travel as the plain class whose equality they share: a `Counter` as a dict, a named tuple as a tuple.

    Raises:
        RecursionError: the value contains itself.
    """
    if value is None or isinstance(value, (bool, str, float)):
        return value
    if isinstance(value, int):
        return ["int", hex(value)]
    if isinstance(value, complex):
        return ["complex", value.real, value.imag]
    if isinstance(value, (bytes, bytearray)):
        return ["bytes", value.hex()]
    if isinstance(value, range):
        return ["range", value.start, value.stop, value.step]
    if isinstance(value, Decimal):
        return ["decimal", str(value)]
    if isinstance(value, Fraction):
        return ["fraction", str(value)]
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
    if tag == "int":
        return int(content[0], 16)
    if tag == "complex":
        return complex(*content)
    if tag == "bytes":
        return bytes.fromhex(content[0])
    if tag == "range":
        return range(*content)
    if tag == "decimal":
        return Decimal(content[0])
    if tag == "fraction":
        return Fraction(content[0])
    if tag == "dict":
        return {decode(key, find): decode(each, find) for key, each in content[0]}
    if tag == "object":
        return find(content[0])
    if tag not in _CONTAINERS:
        raise ValueError(f"no encoded value: {str(tag)[:50]!r}")
    return _CONTAINERS[tag](decode(each, find) for each in content[0])
