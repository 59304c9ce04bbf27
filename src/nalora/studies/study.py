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
    screening_seeds: [0]           # the learning rate has the lowest mean validation loss over these seeds
    drop_rates_worse_than: 0.02    # rates whose validation loss with the first screening seed is higher than the best
                                   # rate's by more than this are not trained with the other ones; none without it
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

from nalora.errors import NALoRAError, SettingsError, collecting
from nalora.files import yaml_reader
from nalora.runs import packaged
from nalora.runs.settings import Run, check
from nalora.runs.trust import refuse_untrusted_study
from nalora.studies.checks import MARGIN, RATES, problems_of_shape


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
    drop_rates_worse_than: float | None = None
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
        rates = self._meaning(cell).get(RATES, self.learning_rates)
        return [replace(arm, learning_rates=arm.learning_rates or tuple(map(float, rates))) for arm in self.arms]

    def run(self, cell: Mapping[str, Any], arm: Arm, learning_rate: float, seed: int) -> Run:
        """One run of the study, wherever it may be kept."""
        combined = {name: value for name, value in self._meaning(cell).items() if name != RATES}
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


def read(file: str | Path, *, trust: bool = True) -> Study:
    """The study that a YAML file describes.

    Args:
        file: its path, or the name of one that comes with nalora.
        trust: whether Python files that it names as methods may run, as they do where it is conducted.

    Raises:
        NALoRAError: no such file, a study that cannot run, with every problem that was found, or one that would run
            code without trust.
    """
    path = packaged.study(file)
    given = yaml_reader.read(path, "a study's YAML file", "see `nalora recipes` for those that come with nalora")
    if "arms" not in given and "model" in given:
        raise NALoRAError(str(path), found="a run", expected="a study's YAML file", fix=f"nalora train {path}")
    if not trust:
        refuse_untrusted_study(given, path)
    return understand({"name": path.stem, **given}, where=str(path))


def question(file: str | Path) -> str:
    """What a study's file says that it asks, in the comment before its first line."""
    lines = packaged.study(file).read_text(encoding="utf-8").splitlines()
    comment = itertools.takewhile(lambda line: line.startswith("#"), lines)
    left_out = ("# nalora ", packaged.IN_SHORT)
    said = " ".join(line.removeprefix("#").strip() for line in comment if not line.startswith(left_out))
    return said.partition("Runs: ")[0].strip()


def understand(given: Mapping[Any, Any], where: str = "study") -> Study:
    """Check a study as a whole: each of its runs must be one that can start.

    Args:
        given: what its file says.
        where: the file, for the error.

    Raises:
        NALoRAError: every problem of the study's shape at once; where there is none, every one of its runs.
    """
    known = {each.name for each in dataclasses.fields(Study)} | {"seeds"}
    problems = problems_of_shape(given, known)
    if not problems:
        seeds = tuple(given.get("seeds", (0,)))
        study = Study(
            name=str(given.get("name", "study")),
            settings=dict(given["settings"]),
            arms=tuple(_arm(name, dict(each or {}), seeds) for name, each in given["arms"].items()),
            over={name: _grid(name, values) for name, values in (given.get("over") or {}).items()},
            controls={str(arm): tuple(map(str, each)) for arm, each in (given.get("controls") or {}).items()},
            learning_rates=tuple(float(rate) for rate in given.get(RATES, ())),
            screening_seeds=tuple(given.get("screening_seeds", (0,))),
            drop_rates_worse_than=None if (margin := given.get(MARGIN)) is None else float(margin),
            **{name: given[name] for name in ("validation_size", "ask", "ask_limit", "ask_tokens") if name in given},
        )
        problems = _problems_of_runs(study)
    if problems:
        raise SettingsError(where, problems)
    return study


def _arm(name: str, given: dict[str, Any], seeds: tuple[int, ...]) -> Arm:
    rates, own_seeds = given.pop(RATES, ()), given.pop("seeds", seeds)
    return Arm(str(name), given, tuple(map(float, rates)), tuple(own_seeds))


def _grid(name: str, values: Any) -> tuple[Any, ...] | dict[str, dict[str, Any]]:
    """A setting's values; each under a name where some are lists, which a combination is not told apart by."""
    if isinstance(values, dict):
        return values
    if any(isinstance(value, list | dict) for value in values):
        return {str(value): {name: value} for value in values}
    return tuple(values)


def _problems_of_runs(study: Study) -> list[str]:
    problems = ["arms: two of one name"] if len({arm.name for arm in study.arms}) < len(study.arms) else []
    for cell in study.cells():
        for arm in study.arms_in(cell):
            if not arm.learning_rates:
                problems.append(f"arm {arm.name}: no learning rates")
                continue
            with collecting(problems):
                study.run(cell, arm, arm.learning_rates[0], arm.seeds[0])
    return list(dict.fromkeys(problems))
