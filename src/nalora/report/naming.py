"""Names that others chose (of runs, arms, settings) as a page, a chart or a table can show them: short and harmless."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable

# What a chart's axis and a table's first column have room for.
MOST = 48
_HEAD, _TAIL = 28, 16


def tidy(text: str) -> str:
    """On one line, without control characters, lone surrogates and the two others that XML does not allow."""
    return "".join("\N{REPLACEMENT CHARACTER}" if _is_forbidden(c) else c for c in " ".join(text.split()))


def brief(names: Iterable[str], most: int = MOST) -> dict[str, str]:
    """Every name with its short form; two names never share one.

    A long name keeps its beginning and its end, since folders and settings differ at either.
    """
    forms: dict[str, str] = {}
    every = list(dict.fromkeys(names))
    taken = {name for name in every if len(name) <= most}
    for name in every:
        short = name if len(name) <= most else f"{name[:_HEAD]}…{name[-_TAIL:]}"
        number = 2
        while name not in taken and short in taken:
            short = f"{name[:_HEAD]}…{name[-_TAIL:]} ({number})"
            number += 1
        forms[name] = short
        taken.add(short)
    return forms


def _is_forbidden(character: str) -> bool:
    return unicodedata.category(character) in ("Cc", "Cs") or character in "\ufffe\uffff"
