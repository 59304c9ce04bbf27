"""Names of runs, arms, settings and layers in the form that a page, a chart or a table can show: short and harmless."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nalora.report.data import RunData

# The longest name in a chart's axis and a table's first column.
MOST = 48
_HEAD, _TAIL = 28, 16
_NOT_A_SETTING = ("seed", "output")


def tidy(text: str) -> str:
    """Return text on one line; control characters, lone surrogates and what XML forbids are replaced."""
    return "".join("\N{REPLACEMENT CHARACTER}" if _is_forbidden(c) else c for c in " ".join(text.split()))


def _is_forbidden(character: str) -> bool:
    return unicodedata.category(character) in ("Cc", "Cs") or character in "\ufffe\uffff"


def brief(names: Iterable[str], most: int = MOST) -> dict[str, str]:
    """Return every name with a unique short form: its start and end, as folders and settings differ in either."""
    forms: dict[str, str] = {}
    unique = list(dict.fromkeys(names))
    taken = {name for name in unique if len(name) <= most}
    for name in unique:
        short = name if len(name) <= most else f"{name[:_HEAD]}…{name[-_TAIL:]}"
        number = 2
        while name not in taken and short in taken:
            short = f"{name[:_HEAD]}…{name[-_TAIL:]} ({number})"
            number += 1
        forms[name] = short
        taken.add(short)
    return forms


def gathered(reasons: Iterable[tuple[str, str]]) -> list[str]:
    """Return one sentence for all names with the same reason."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons:
        names.setdefault(reason, []).append(name)
    return [f"{', '.join(group)}: {reason}" for reason, group in names.items()]


def layer_labels(blocks: Sequence[str]) -> list[str]:
    """Return short unique names of blocks: the number in `model.layers.3.mlp`, with the other parts that differ."""
    numbers = [str(number) for number in range(len(blocks))]
    parts = [name.split(".") for name in blocks]
    if len({len(names) for names in parts}) != 1:
        return numbers
    places = [i for i, column in enumerate(zip(*parts, strict=True)) if len(set(column)) > 1]
    if not places:
        digits = [" ".join(part for part in names if part.isdigit()) for names in parts]
        return [label or number for label, number in zip(digits, numbers, strict=True)]
    for count in range(1, len(places) + 1):
        labels = [" ".join(names[i] for i in places[:count]) for names in parts]
        if len(set(labels)) == len(blocks):
            return labels
    return numbers


def row_labels(runs: Sequence[RunData]) -> list[str]:
    """Return each run's method with the settings that differ; runs that differ in the seed alone share a label."""
    settings = [{k: v for k, v in run.settings.items() if k not in _NOT_A_SETTING} for run in runs]
    labels = []
    for run, own in zip(runs, settings, strict=True):
        same_method = [other for other, other_run in zip(settings, runs, strict=True) if other_run.method == run.method]
        differ = [k for k in own if any(other.get(k) != own[k] for other in same_method)]
        differ += [k for k in ("model", "task") if k in own and any(other.get(k) != own[k] for other in settings)]
        listed = ", ".join(f"{k}={own[k]}" for k in dict.fromkeys(differ) if k != "method")
        labels.append(f"{run.method} ({listed})" if listed else run.method)
    cells = [(label, seed_of(run)) for label, run in zip(labels, runs, strict=True)]
    # Runs with the same settings and seed cannot share a cell, so their labels include their names.
    return [
        f"{label} [{run.name}]" if cells.count((label, seed)) > 1 else label
        for (label, seed), run in zip(cells, runs, strict=True)
    ]


def seed_of(run: RunData) -> int:
    """Return the run's seed; 0, the default, where its settings are not known."""
    seed = run.settings.get("seed", 0)
    return seed if isinstance(seed, int) else 0
