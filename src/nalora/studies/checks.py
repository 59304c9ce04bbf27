"""Whether a study's file has the shape of a study, said before any of its runs is looked at."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

from nalora.errors import shortened
from nalora.runs.conversion import converted

RATES = "learning_rates"
MARGIN = "drop_rates_worse_than"
# File systems take 255 bytes; the answer's files add an ending to the study's name.
_LONGEST_NAME = 200
# Settings that a study gives to each run itself.
_ITS_OWN = ("seed", "learning_rate", "output", "validation_size")
_Limit = tuple[Callable[[Any], bool], str]
_POSITIVE: _Limit = (lambda number: number > 0, "a positive number")
_FROM_0: _Limit = (lambda number: number >= 0, "a whole number, 0 or more")
_FROM_1: _Limit = (lambda number: number >= 1, "a whole number, 1 or more")
# Parts that are a value or a list of them: their types, and the limits of their numbers.
_VALUES: Mapping[str, tuple[Any, _Limit]] = {
    RATES: (list[float], _POSITIVE),
    "seeds": (list[int], _FROM_0),
    "screening_seeds": (list[int], _FROM_0),
    "validation_size": (int, _FROM_1),
    "ask_limit": (int | None, _FROM_1),
    "ask_tokens": (int, _FROM_1),
    MARGIN: (float | None, _POSITIVE),
}


def problems_of_shape(content: Mapping[Any, Any], parts: Collection[str]) -> list[str]:
    """A sentence for everything that is not as a study has it; none where its runs can be made.

    Args:
        content: what the file says.
        parts: the names that stand in a study's first column.
    """
    problems = [f"{key}: no such part of a study" for key in content if key not in parts]
    problems += _of_name(content.get("name", "study"))
    for part in ("settings", "arms"):
        if content.get(part) in (None, {}):
            problems.append(f"{part}: missing or empty")
        elif not isinstance(content[part], dict):
            problems.append(f"{part}: {_shown(content[part])}, expected `name: value` lines")
    problems += _of_settings("settings", content.get("settings"))
    for name, settings in content["arms"].items() if isinstance(content.get("arms"), dict) else ():
        if isinstance(settings, dict | None):
            problems += _of_settings(f"arms.{name}", settings)
            problems += _of_values(f"arms.{name}.", settings or {}, (RATES, "seeds"))
        else:
            problems.append(f"arms.{name}: {_shown(settings)}, expected settings, such as {{method: lora}}")
    problems += _of_over(content.get("over"))
    problems += _of_controls(content.get("controls"), content.get("arms"))
    problems += _of_values("", content, tuple(_VALUES))
    if "ask" in content:
        converted("ask", content["ask"], Literal["chosen", "none", "all"], problems)
    return problems


def _of_name(name: Any) -> list[str]:
    """It becomes the name of the answer's files."""
    text = str(name)
    if isinstance(name, dict | list | None) or not text.strip() or not text.isprintable():
        return [f"name: {_shown(name)}, expected a text"]
    if len(text.encode()) > _LONGEST_NAME:
        return [f"name: {len(text.encode())} bytes long, expected at most {_LONGEST_NAME}: it becomes a file's name"]
    return [f"name: {text!r}, expected a file's name, not a path"] if set(text) & set("/\\") else []


def _of_settings(where: str, settings: Any) -> list[str]:
    """Settings that are given together, wherever in the study."""
    if not isinstance(settings, dict):
        return []
    problems = [f"{where}: {name!r}, expected the name of a setting" for name in settings if not isinstance(name, str)]
    return problems + [f"{where}: {name} is the study's to give" for name in _ITS_OWN if name in settings]


def _of_values(prefix: str, content: Mapping[Any, Any], parts: Sequence[str]) -> list[str]:
    """The values and lists of values among some settings."""
    problems: list[str] = []
    for part in (part for part in parts if part in content):
        (hint, (holds, expected)), where = _VALUES[part], f"{prefix}{part}"
        known = len(problems)
        value = converted(where, content[part], hint, problems)
        numbers = value if isinstance(value, list) else [value]
        if len(problems) > known:
            continue
        wrong = [number for number in numbers if number is not None and not holds(number)]
        problems += [f"{where}: {number!r}, expected {expected}" for number in wrong]
        problems += _repeated(where, numbers) if numbers else [f"{where}: an empty list"]
    return problems


def _of_over(over: Any) -> list[str]:
    """Lists of a setting's values, and names under which several settings are content."""
    if not isinstance(over, dict | None):
        return [f"over: {_shown(over)}, expected `setting: [value, ...]` lines"]
    problems: list[str] = []
    for name, values in (over or {}).items():
        where = f"over.{name}"
        if not isinstance(name, str):
            problems.append(f"over: {name!r}, expected the name of a setting")
        elif not isinstance(values, list | dict):
            problems.append(f"{where}: {_shown(values)}, expected a list of values")
        elif not values:
            problems.append(f"{where}: an empty grid")
        elif isinstance(values, list) and name in (*_ITS_OWN, RATES):
            problems.append(f"{where}: {name} is the study's to give")
        else:
            problems += _repeated(where, list(values))
        for key, settings in values.items() if isinstance(values, dict) else ():
            if isinstance(settings, dict):
                problems += _of_settings(f"{where}.{key}", settings) + _of_values(f"{where}.{key}.", settings, [RATES])
            else:
                problems.append(f"{where}.{key}: no settings")
    return problems


def _of_controls(controls: Any, arms: Any) -> list[str]:
    controls = {} if controls is None else controls
    if not isinstance(controls, dict) or not all(isinstance(others, list) and others for others in controls.values()):
        return ["controls: expected `arm: [other arm, ...]` lines"]
    named = [str(name) for arm, others in controls.items() for name in (arm, *others)]
    known = {str(arm) for arm in arms} if isinstance(arms, dict) else set()
    problems = [f"controls: no arm {name!r}" for name in dict.fromkeys(named) if name not in known]
    problems += [f"controls: {arm!r} is its own" for arm, others in controls.items() if arm in others]
    return problems + [text for arm, others in controls.items() for text in _repeated(f"controls.{arm}", others)]


def _repeated(where: str, values: Sequence[Any]) -> list[str]:
    """Values that are equal, or that a table could not distinguish."""
    repeated = [
        value
        for place, value in enumerate(values)
        if any(value == other or str(value) == str(other) for other in values[:place])
    ]
    return list(dict.fromkeys(f"{where}: {value} is given twice" for value in repeated))


def _shown(value: Any) -> str:
    """What was found, as it is where that is short."""
    kinds = {type(None): "nothing", list: "a list", dict: "`name: value` lines"}
    return kinds.get(type(value)) or shortened(repr(value))
