"""A study's file: what is compared, over which settings, how learning rates are chosen, with which seeds.

::

    name: laptop
    settings:                      # of every run
      model: smollm2-135m
      task: gym/chain_sum
    arms:                          # what is compared; the first is the baseline
      lora: {method: lora}
      na-lora: {method: na-lora, apply_to: update}
      random channels: {method: na-lora-random, apply_to: update}
    over:                          # further settings: every combination is a table of its own
      rank: [8, 32]
      sums:                        # several settings together under a name, with learning rates where they need others
        short: {settings: {max_terms: 2}}
        long: {settings: {max_terms: 6}, max_length: 256, learning_rates: [1.0e-4, 3.0e-4, 1.0e-3]}
    controls:                      # what an arm must beat beside the baseline: corrected among themselves
      na-lora: [random channels]
    learning_rates: [3.0e-4, 1.0e-3, 3.0e-3]       # of every arm; an arm may give its own, which go before all others
    validation_size: 200           # held out of the training set, to choose the learning rate by
    screening_seeds: [0]
    seeds: [0, 1, 2]               # of the runs that are compared
    ask: chosen                    # whose test answers are written: chosen runs, none, or all
    ask_limit: 100                 # only the first so many questions; all without it
    ask_tokens: 262144             # how much is written at a time; 32,768 without it
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from nalora.errors import NALoRAError
from nalora.training.settings import Run, check

# Settings that a study gives to each run itself.
_ITS_OWN = ("seed", "learning_rate", "output", "validation_size")
_RATES = "learning_rates"


@dataclass(frozen=True)
class Arm:
    """One of the things compared.

    Args:
        name: in tables.
        settings: beside those of every run.
        learning_rates: its own that are tried; none where those of the combination or the study are.
        seeds: of the runs that are compared.
    """

    name: str
    settings: Mapping[str, Any]
    learning_rates: tuple[float, ...]
    seeds: tuple[int, ...]


@dataclass(frozen=True)
class Study:
    """A checked study."""

    name: str
    settings: Mapping[str, Any]
    arms: tuple[Arm, ...]
    over: Mapping[str, tuple[Any, ...] | Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)
    controls: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    learning_rates: tuple[float, ...] = ()
    validation_size: int = 200
    screening_seeds: tuple[int, ...] = (0,)
    ask: Literal["chosen", "none", "all"] = "chosen"
    ask_limit: int | None = None
    ask_tokens: int = 32_768

    @property
    def baseline(self) -> str:
        """The arm the others are compared with."""
        return self.arms[0].name

    def cells(self) -> list[dict[str, Any]]:
        """Every combination of the values, or the names, in `over`; one empty one where there are none."""
        return [dict(zip(self.over, values, strict=True)) for values in itertools.product(*self.over.values())]

    def arms_in(self, cell: Mapping[str, Any]) -> list[Arm]:
        """The arms with the learning rates that each tries there: its own, the combination's, or the study's."""
        rates = self._meaning(cell).get(_RATES, self.learning_rates)
        return [replace(arm, learning_rates=arm.learning_rates or tuple(map(float, rates))) for arm in self.arms]

    def run(self, cell: Mapping[str, Any], arm: Arm, learning_rate: float, seed: int) -> Run:
        """One run of the study, wherever it may be kept."""
        combined = {name: value for name, value in self._meaning(cell).items() if name != _RATES}
        own = {"learning_rate": learning_rate, "seed": seed, "validation_size": self.validation_size}
        where = f"study {self.name!r}, arm {arm.name!r}"
        return check({**self.settings, **combined, **arm.settings, **own}, where=where)

    def _meaning(self, cell: Mapping[str, Any]) -> dict[str, Any]:
        """What a combination sets: a value its setting, a name all that stands under it."""
        meaning: dict[str, Any] = {}
        for name, value in cell.items():
            values = self.over[name]
            meaning |= values[value] if isinstance(values, Mapping) else {name: value}
        return meaning


def read(file: str | Path) -> Study:
    """The study that a YAML file describes.

    Raises:
        NALoRAError: no such file, or a study that cannot run, with every problem that was found.
    """
    import yaml

    path = Path(file)
    if not path.is_file():
        raise NALoRAError(str(path), found="no such file", expected="a study's YAML file", fix="see studies/")
    try:
        given = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise NALoRAError(str(path), found=" ".join(str(error).split()), expected="YAML", fix="mend it") from error
    if not isinstance(given, dict):
        raise NALoRAError(str(path), found=type(given).__name__, expected="`key: value` lines", fix="see studies/")
    return understand({"name": path.stem, **given}, where=str(path))


def question(file: str | Path) -> str:
    """What a study's file says that it asks, in the comment before its first line."""
    lines = Path(file).read_text(encoding="utf-8").splitlines()
    comment = itertools.takewhile(lambda line: line.startswith("#"), lines)
    said = " ".join(line.removeprefix("#").strip() for line in comment if not line.startswith("# nalora "))
    return said.partition("Runs: ")[0].strip()


def understand(given: Mapping[str, Any], where: str = "study") -> Study:
    """Check a study as a whole: each of its runs must be one that can start.

    Raises:
        NALoRAError: every problem at once.
    """
    problems = _problems_of_shape(given)
    if not problems:
        seeds = tuple(given.get("seeds", (0,)))
        study = Study(
            name=str(given.get("name", "study")),
            settings=dict(given["settings"]),
            arms=tuple(_arm(name, dict(each or {}), seeds) for name, each in given["arms"].items()),
            over={
                name: values if isinstance(values, dict) else tuple(values)
                for name, values in (given.get("over") or {}).items()
            },
            controls={arm: tuple(each) for arm, each in (given.get("controls") or {}).items()},
            learning_rates=tuple(float(rate) for rate in given.get(_RATES, ())),
            validation_size=given.get("validation_size", 200),
            screening_seeds=tuple(given.get("screening_seeds", (0,))),
            ask=given.get("ask", "chosen"),
            ask_limit=given.get("ask_limit"),
            ask_tokens=given.get("ask_tokens", 32_768),
        )
        problems = _problems_of_runs(study)
    if problems:
        raise NALoRAError(
            where,
            found=f"{len(problems)} problem{'s' if len(problems) > 1 else ''}: " + "; ".join(problems),
            expected="a study whose every run can start",
            fix="correct them; nothing was started",
        )
    return study


def _arm(name: str, given: dict[str, Any], seeds: tuple[int, ...]) -> Arm:
    rates, own_seeds = given.pop(_RATES, None), given.pop("seeds", None)
    return Arm(str(name), given, tuple(map(float, rates or ())), tuple(own_seeds) if own_seeds else seeds)


def _problems_of_shape(given: Mapping[str, Any]) -> list[str]:
    known = {each.name for each in dataclasses.fields(Study)} | {"seeds"}
    problems = [f"{key}: no such part of a study" for key in given if key not in known]
    for part in ("settings", "arms"):
        if not isinstance(given.get(part), dict) or not given[part]:
            problems.append(f"{part}: missing or empty")
    named: list[Any] = []
    for name, values in (given.get("over") or {}).items():
        if not isinstance(values, list | dict) or not values:
            problems.append(f"over.{name}: an empty grid")
        elif isinstance(values, dict):
            problems += [f"over.{name}.{each}: no settings" for each, s in values.items() if not isinstance(s, dict)]
            named += values.values()
    problems += _problems_of_controls(given.get("controls") or {}, given.get("arms"))
    for part in ("learning_rates", "seeds", "screening_seeds"):
        if part in given and (not isinstance(given[part], list) or not given[part]):
            problems.append(f"{part}: an empty list")
    if given.get("ask", "chosen") not in ("chosen", "none", "all"):
        problems.append(f"ask: {given['ask']!r}, expected chosen, none or all")
    sources = {"settings": [given.get("settings")], "arms": (given.get("arms") or {}).values(), "over": named}
    for part, each_settings in sources.items():
        for settings in each_settings:
            taken = [name for name in _ITS_OWN if isinstance(settings, dict) and name in settings]
            problems += [f"{part}: {name} is the study's to give" for name in taken]
    return problems


def _problems_of_controls(controls: Any, arms: Any) -> list[str]:
    if not isinstance(controls, dict) or not all(isinstance(each, list) and each for each in controls.values()):
        return ["controls: expected `arm: [other arm, ...]` lines"]
    named = [name for arm, others in controls.items() for name in (arm, *others)]
    unknown = [name for name in dict.fromkeys(named) if name not in (arms or {})]
    alone = [arm for arm, others in controls.items() if arm in others]
    return [f"controls: no arm {name!r}" for name in unknown] + [f"controls: {arm!r} is its own" for arm in alone]


def _problems_of_runs(study: Study) -> list[str]:
    problems = ["arms: two of one name"] if len({arm.name for arm in study.arms}) < len(study.arms) else []
    for cell in study.cells():
        for arm in study.arms_in(cell):
            if not arm.learning_rates:
                problems.append(f"arm {arm.name}: no learning rates")
                continue
            try:
                study.run(cell, arm, arm.learning_rates[0], arm.seeds[0])
            except NALoRAError as error:
                problems.append(str(error))
    return list(dict.fromkeys(problems))
