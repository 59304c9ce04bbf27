"""Checks of the shape of a study's file, made before any of its runs is checked."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal

from nalora.errors import shortened
from nalora.runs.conversion import converted

RATES = "learning_rates"
MARGIN = "drop_rates_worse_than"
# File systems allow 255 bytes; the answer's files add an ending to the study's name.
_LONGEST_NAME = 200
# Settings of runs that the study sets itself.
_RESERVED = ("seed", "learning_rate", "output", "validation_size")
_Limit = tuple[Callable[[Any], bool], str]
_ANY: _Limit = (lambda value: True, "")
_POSITIVE: _Limit = (lambda number: number > 0, "a positive number")
_FROM_0: _Limit = (lambda number: number >= 0, "a whole number, 0 or more")
_FROM_1: _Limit = (lambda number: number >= 1, "a whole number, 1 or more")
# Settings of a study that are a value or a list of values: their types, and the limits of their numbers.
_VALUES: Mapping[str, tuple[Any, _Limit]] = {
    RATES: (list[float], _POSITIVE),
    "seeds": (list[int], _FROM_0),
    "screening_seeds": (list[int], _FROM_0),
    "validation_size": (int, _FROM_1),
    "test_limit": (int | None, _FROM_1),
    "max_batch_tokens": (int, _FROM_1),
    MARGIN: (float | None, _POSITIVE),
    "generate": (Literal["chosen", "none", "all"], _ANY),
}


def shape_problems(content: Mapping[Any, Any], known: Collection[str]) -> list[str]:
    """Return a sentence for every setting of a study that has the wrong shape; `known` are the names it may have."""
    problems = [f"{key}: no such setting of a study" for key in content if key not in known]
    problems += _name(content.get("name", "study"))
    for part in ("settings", "arms"):
        if content.get(part) in (None, {}):
            problems.append(f"{part}: missing or empty")
        elif not isinstance(content[part], dict):
            problems.append(f"{part}: {_shown(content[part])}, expected `name: value` lines")
    problems += _run_settings("settings", content.get("settings"))
    for name, settings in content["arms"].items() if isinstance(content.get("arms"), dict) else ():
        if isinstance(settings, dict | None):
            problems += _run_settings(f"arms.{name}", settings)
            problems += _values(f"arms.{name}.", settings or {}, (RATES, "seeds"))
        else:
            problems.append(f"arms.{name}: {_shown(settings)}, expected settings, such as {{method: lora}}")
    problems += _over(content.get("over"))
    problems += _controls(content.get("controls"), content.get("arms"))
    problems += _claims(content.get("claims"), content.get("arms"))
    return problems + _values("", content, tuple(_VALUES))


def _name(name: Any) -> list[str]:
    """Check the study's name, which becomes the name of files."""
    text = str(name)
    if isinstance(name, dict | list | None) or not text.strip() or not text.isprintable():
        return [f"name: {_shown(name)}, expected a text"]
    if len(text.encode()) > _LONGEST_NAME:
        return [f"name: {len(text.encode())} bytes long, expected at most {_LONGEST_NAME}: it becomes a file's name"]
    return [f"name: {text!r}, expected a file's name, not a path"] if set(text) & set("/\\") else []


def _run_settings(where: str, settings: Any) -> list[str]:
    """Check the names of settings of runs; their values are checked with the runs."""
    if not isinstance(settings, dict):
        return []
    problems = [f"{where}: {name!r}, expected the name of a setting" for name in settings if not isinstance(name, str)]
    place = {"validation_size": ": write it at the top level of the file"}
    own = [f"{where}: {name} is set by the study itself{place.get(name, '')}" for name in _RESERVED if name in settings]
    return problems + own


def _values(prefix: str, content: Mapping[Any, Any], parts: Sequence[str]) -> list[str]:
    """Check those of `parts` that are given against `_VALUES`."""
    problems: list[str] = []
    for part in (part for part in parts if part in content):
        (hint, (holds, expected)), where = _VALUES[part], f"{prefix}{part}"
        before = len(problems)
        value = converted(where, content[part], hint, problems)
        values = value if isinstance(value, list) else [value]
        if len(problems) > before:
            continue
        wrong = [number for number in values if number is not None and not holds(number)]
        problems += [f"{where}: {number!r}, expected {expected}" for number in wrong]
        problems += _repeated(where, values) if values else [f"{where}: an empty list"]
    return problems


def _over(over: Any) -> Iterator[str]:
    """Check lists of a setting's values, and names for several settings."""
    if not isinstance(over, dict | None):
        yield f"over: {_shown(over)}, expected `setting: [value, ...]` lines"
        return
    for name, values in (over or {}).items():
        where = f"over.{name}"
        if not isinstance(name, str):
            yield f"over: {name!r}, expected the name of a setting"
        elif not isinstance(values, list | dict):
            yield f"{where}: {_shown(values)}, expected a list of values"
        elif not values:
            yield f"{where}: an empty list"
        elif isinstance(values, list) and name in (*_RESERVED, RATES):
            yield f"{where}: {name} is set by the study itself"
        else:
            yield from _repeated(where, list(values))
        for key, settings in values.items() if isinstance(values, dict) else ():
            if isinstance(settings, dict):
                yield from _run_settings(f"{where}.{key}", settings)
                yield from _values(f"{where}.{key}.", settings, [RATES])
            else:
                yield f"{where}.{key}: {_shown(settings)}, expected settings"


def _controls(controls: Any, arms: Any) -> list[str]:
    controls = {} if controls is None else controls
    if not isinstance(controls, dict) or not all(isinstance(others, list) and others for others in controls.values()):
        return ["controls: expected `arm: [other arm, ...]` lines"]
    named = [str(name) for arm, others in controls.items() for name in (arm, *others)]
    known = {str(arm) for arm in arms} if isinstance(arms, dict) else set()
    problems = [f"controls: no arm {name!r}" for name in dict.fromkeys(named) if name not in known]
    problems += [f"controls: {arm!r} is listed as its own control" for arm, others in controls.items() if arm in others]
    return problems + [text for arm, others in controls.items() for text in _repeated(f"controls.{arm}", others)]


def _claims(claims: Any, arms: Any) -> list[str]:
    if claims is None:
        return []
    if not isinstance(claims, list) or not claims:
        return ["claims: expected a list of arms"]
    baseline, *others = (str(arm) for arm in arms) if isinstance(arms, dict) and arms else ("",)
    problems = [f"claims: no arm {name!r}" for name in map(str, claims) if name not in (baseline, *others)]
    problems += [f"claims: {name!r} is the baseline" for name in map(str, claims) if name == baseline]
    return problems + _repeated("claims", claims)


def _repeated(where: str, values: Sequence[Any]) -> list[str]:
    """Name values that are equal, or that look the same in a table."""
    repeated = [
        value
        for index, value in enumerate(values)
        if any(value == other or str(value) == str(other) for other in values[:index])
    ]
    return list(dict.fromkeys(f"{where}: {value} is given twice" for value in repeated))


def _shown(value: Any) -> str:
    kinds = {type(None): "nothing", list: "a list", dict: "`name: value` lines"}
    return kinds.get(type(value)) or shortened(repr(value))
