"""Whether a study's file has the shape of a study, said before any of its runs is looked at."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

RATES = "learning_rates"
MARGIN = "drop_rates_worse_than"
# File systems take 255 bytes; the answer's files add an ending to the study's name.
_LONGEST_NAME = 200
# Settings that a study gives to each run itself.
_ITS_OWN = ("seed", "learning_rate", "output", "validation_size")


def problems_of_shape(given: Mapping[Any, Any], parts: Collection[str]) -> list[str]:
    """A sentence for everything that is not as a study has it; none where its runs can be made.

    Args:
        given: what the file says.
        parts: the names that stand in a study's first column.
    """
    problems = [f"{key}: no such part of a study" for key in given if key not in parts]
    problems += _of_name(given.get("name", "study"))
    for part in ("settings", "arms"):
        if given.get(part) in (None, {}):
            problems.append(f"{part}: missing or empty")
        elif not isinstance(given[part], dict):
            problems.append(f"{part}: {_told(given[part])}, expected `name: value` lines")
    problems += _of_settings("settings", given.get("settings"))
    problems += _of_arms(given.get("arms"))
    problems += _of_over(given.get("over"))
    problems += _of_controls(given.get("controls"), given.get("arms"))
    for part, check in _LISTS.items():
        problems += _of_list(part, given[part], check) if part in given else []
    for part in ("validation_size", "ask_limit", "ask_tokens"):
        value = given.get(part, 1)
        if not (_is_whole(value) and value >= 1) and not (part == "ask_limit" and value is None):
            problems.append(f"{part}: {_told(value)}, expected a whole number, 1 or more")
    if (margin := given.get(MARGIN)) is not None and _rate(margin) is None:
        problems.append(f"{MARGIN}: {_told(margin)}, expected a positive number")
    if given.get("ask", "chosen") not in ("chosen", "none", "all"):
        problems.append(f"ask: {given['ask']!r}, expected chosen, none or all")
    return problems


def _of_name(name: Any) -> list[str]:
    """It becomes the name of the answer's files."""
    text = str(name)
    if isinstance(name, dict | list | None) or not text.strip() or not text.isprintable():
        return [f"name: {_told(name)}, expected a text"]
    if len(text.encode()) > _LONGEST_NAME:
        return [f"name: {len(text.encode())} bytes long, expected at most {_LONGEST_NAME}: it becomes a file's name"]
    return [f"name: {text!r}, expected a file's name, not a path"] if set(text) & set("/\\") else []


def _of_settings(where: str, settings: Any) -> list[str]:
    """Settings that stand together, wherever in the study they do."""
    if not isinstance(settings, dict):
        return []
    problems = [f"{where}: {name!r}, expected the name of a setting" for name in settings if not isinstance(name, str)]
    return problems + [f"{where}: {name} is the study's to give" for name in _ITS_OWN if name in settings]


def _of_arms(arms: Any) -> list[str]:
    problems: list[str] = []
    for name, settings in arms.items() if isinstance(arms, dict) else ():
        where = f"arms.{name}"
        if not isinstance(settings, dict | None):
            problems.append(f"{where}: {_told(settings)}, expected settings, such as {{method: lora}}")
            continue
        problems += _of_settings(where, settings)
        for part in (RATES, "seeds"):
            if settings and part in settings:
                problems += _of_list(f"{where}.{part}", settings[part], _LISTS[part])
    return problems


def _of_over(over: Any) -> list[str]:
    """Lists of a setting's values, and names under which several settings stand."""
    if not isinstance(over, dict | None):
        return [f"over: {_told(over)}, expected `setting: [value, ...]` lines"]
    problems: list[str] = []
    for name, values in (over or {}).items():
        where = f"over.{name}"
        if not isinstance(name, str):
            problems.append(f"over: {name!r}, expected the name of a setting")
        elif not isinstance(values, list | dict):
            problems.append(f"{where}: {_told(values)}, expected a list of values")
        elif not values:
            problems.append(f"{where}: an empty grid")
        elif isinstance(values, dict):
            problems += _of_combinations(where, values)
        else:
            problems += [f"{where}: {name} is the study's to give"] if name in (*_ITS_OWN, RATES) else []
            problems += _repeated(where, values)
    return problems


def _of_combinations(where: str, named: Mapping[Any, Any]) -> list[str]:
    problems = _repeated(where, list(named))
    for name, settings in named.items():
        if not isinstance(settings, dict):
            problems.append(f"{where}.{name}: no settings")
            continue
        problems += _of_settings(f"{where}.{name}", settings)
        problems += _of_list(f"{where}.{name}.{RATES}", settings[RATES], _rate) if RATES in settings else []
    return problems


def _of_controls(controls: Any, arms: Any) -> list[str]:
    controls = {} if controls is None else controls
    if not isinstance(controls, dict) or not all(isinstance(each, list) and each for each in controls.values()):
        return ["controls: expected `arm: [other arm, ...]` lines"]
    named = [str(name) for arm, others in controls.items() for name in (arm, *others)]
    known = {str(arm) for arm in arms} if isinstance(arms, dict) else set()
    unknown = [name for name in dict.fromkeys(named) if name not in known]
    alone = [arm for arm, others in controls.items() if arm in others]
    problems = [f"controls: no arm {name!r}" for name in unknown] + [f"controls: {arm!r} is its own" for arm in alone]
    return problems + [each for arm, others in controls.items() for each in _repeated(f"controls.{arm}", others)]


def _of_list(where: str, values: Any, check: Callable[[Any], float | None]) -> list[str]:
    """A list of learning rates or of seeds."""
    if not isinstance(values, list):
        return [f"{where}: {_told(values)}, expected a list"]
    if not values:
        return [f"{where}: an empty list"]
    expected = "a positive number" if check is _rate else "a whole number, 0 or more"
    wrong = [f"{where}: {_told(value)}, expected {expected}" for value in values if check(value) is None]
    return wrong or _repeated(where, [check(value) for value in values])


def _repeated(where: str, values: Sequence[Any]) -> list[str]:
    """Values that are equal, or that a table could not tell apart."""
    found = [
        value
        for place, value in enumerate(values)
        if any(value == other or str(value) == str(other) for other in values[:place])
    ]
    return list(dict.fromkeys(f"{where}: {value} is given twice" for value in found))


def _rate(value: Any) -> float | None:
    """YAML reads 1e-4 as a text."""
    try:
        rate = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return rate if math.isfinite(rate) and rate > 0 else None


def _seed(value: Any) -> int | None:
    return value if _is_whole(value) and value >= 0 else None


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_LISTS: Mapping[str, Callable[[Any], float | None]] = {RATES: _rate, "seeds": _seed, "screening_seeds": _seed}


def _told(value: Any) -> str:
    """What was found, as it is where that is short."""
    if value is None:
        return "nothing"
    if isinstance(value, dict | list):
        return "a list" if isinstance(value, list) else "`name: value` lines"
    return repr(value)
