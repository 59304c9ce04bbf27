"""Names that others chose (of runs, arms, settings) as a page, a chart or a table can show them: short and harmless."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nalora.report.data import RunData

# What a chart's axis and a table's first column have room for.
MOST = 48
_HEAD, _TAIL = 28, 16
_NOT_A_SETTING = ("seed", "output")


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


def row_labels(runs: Sequence[RunData]) -> list[str]:
    """The method, with the settings that tell apart what is not the same setting with another seed."""
    settings = [{k: v for k, v in run.settings.items() if k not in _NOT_A_SETTING} for run in runs]
    labels = []
    for run, mine in zip(runs, settings, strict=True):
        alike = [other for other, each in zip(settings, runs, strict=True) if each.method == run.method]
        differ = [k for k in mine if any(other.get(k) != mine[k] for other in alike)]
        differ += [k for k in ("model", "task") if k in mine and any(other.get(k) != mine[k] for other in settings)]
        told = ", ".join(f"{k}={mine[k]}" for k in dict.fromkeys(differ) if k != "method")
        labels.append(f"{run.method} ({told})" if told else run.method)
    places = [(label, seed_of(run)) for label, run in zip(labels, runs, strict=True)]
    # The same setting and seed twice cannot share a cell, so such runs stand under their own names.
    return [
        f"{place[0]} [{run.name}]" if places.count(place) > 1 else place[0]
        for place, run in zip(places, runs, strict=True)
    ]


def seed_of(run: RunData) -> int:
    """The run's seed; 0, the default, where its settings are not known."""
    seed = run.settings.get("seed", 0)
    return seed if isinstance(seed, int) else 0


def _is_forbidden(character: str) -> bool:
    return unicodedata.category(character) in ("Cc", "Cs") or character in "\ufffe\uffff"
