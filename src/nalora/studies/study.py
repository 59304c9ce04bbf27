"""A study's file: what is compared, over which settings, how learning rates are chosen, with which seeds.

::

    name: laptop
    settings:                      # of every run
      model: smollm2-135m
      task: gym/chain_sum
    arms:                          # what is compared; the first one is the baseline
      lora: {method: lora}
      na-lora: {method: na-lora, apply_to: update}
      random channels: {method: na-lora-random, apply_to: update}
    over:                          # further settings; every combination of their values gets a table
      rank: [8, 32]
      sums:                        # a name for several settings, which may include learning rates
        short: {settings: {max_terms: 2}}
        long: {settings: {max_terms: 6}, max_length: 256, learning_rates: [1.0e-4, 3.0e-4, 1.0e-3]}
    controls:                      # arms that an arm is also compared with; p-values are corrected among these
      na-lora: [random channels]
    learning_rates: [3.0e-4, 1.0e-3, 3.0e-3]       # of every arm; those of an arm itself take precedence
    validation_size: 200           # training examples held out to choose the learning rate
    screening_seeds: [0]           # the learning rate with the lowest mean validation loss over these seeds is chosen
    drop_rates_worse_than: 0.02    # learning rates whose validation loss with the first screening seed exceeds the
                                   # best one by more than this are not trained with the others (default: keep all)
    seeds: [0, 1, 2]               # of the runs that are compared
    generate: chosen               # runs whose test answers are generated: chosen, none or all
    test_limit: 100                # generate answers to the first 100 test questions only (default: all)
    max_batch_tokens: 262144       # prompt and answer tokens per batch of generation (default: 32,768)
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
from nalora.studies.checks import MARGIN, RATES, shape_problems

# Settings of version 0.1 that have been renamed.
_OLD_NAMES = {"ask": "generate", "ask_limit": "test_limit", "ask_tokens": "max_batch_tokens"}


@dataclass(frozen=True)
class Arm:
    """One of the compared variants; without learning rates it uses those of the combination or of the study."""

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
    claims: tuple[str, ...] = ()  # arms whose comparisons with the baseline are a family of their own
    learning_rates: tuple[float, ...] = ()
    validation_size: int = 200
    screening_seeds: tuple[int, ...] = (0,)
    drop_rates_worse_than: float | None = None
    generate: Literal["chosen", "none", "all"] = "chosen"
    test_limit: int | None = None
    max_batch_tokens: int = 32_768

    @property
    def baseline(self) -> str:
        """The arm the others are compared with."""
        return self.arms[0].name

    def combinations(self) -> list[dict[str, Any]]:
        """Return every combination of the values, or the names, in `over`; one empty dict if `over` is empty."""
        return [dict(zip(self.over, values, strict=True)) for values in itertools.product(*self.over.values())]

    def arms_in(self, combination: Mapping[str, Any]) -> list[Arm]:
        """Return the arms with the learning rates of each: its own, the combination's, or the study's."""
        rates = self.settings_of(combination).get(RATES, self.learning_rates)
        return [replace(arm, learning_rates=arm.learning_rates or tuple(map(float, rates))) for arm in self.arms]

    def run(self, combination: Mapping[str, Any], arm: Arm, learning_rate: float, seed: int) -> Run:
        """Return one run of the study; its folder is not set."""
        combined = {name: value for name, value in self.settings_of(combination).items() if name != RATES}
        own = {"learning_rate": learning_rate, "seed": seed, "validation_size": self.validation_size}
        where = f"study {self.name!r}, arm {arm.name!r}"
        return check({**self.settings, **combined, **arm.settings, **own}, where=where)

    def settings_of(self, combination: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings that a combination stands for."""
        settings: dict[str, Any] = {}
        for name, value in combination.items():
            values = self.over[name]
            settings |= values[value] if isinstance(values, Mapping) else {name: value}
        return settings


def read(file: str | Path, *, trust: bool = True) -> Study:
    """Read a study from a YAML file, given by its path or by the name of a packaged study.

    Without `trust`, a study that names Python files (methods, tasks), whose code would run, is refused.

    Raises:
        NALoRAError: no such file, or a study that cannot run (all problems in one message).
    """
    path = packaged.find(file, packaged.studies())
    content = yaml_reader.read(path, "a study's YAML file", "see `nalora recipes` for those that come with nalora")
    if "arms" not in content and "model" in content:
        raise NALoRAError(str(path), found="a run", expected="a study's YAML file", fix=f"nalora train {path}")
    if not trust:
        refuse_untrusted_study(content, path)
    return parse({"name": path.stem, **content}, where=str(path))


def question(file: str | Path) -> str:
    """Return the study's question: the comment at the top of its file, up to the number of runs."""
    lines = packaged.find(file, packaged.studies()).read_text(encoding="utf-8").splitlines()
    comment = itertools.takewhile(lambda line: line.startswith("#"), lines)
    left_out = ("# nalora ", "# for ", packaged.IN_SHORT)
    text = " ".join(line.removeprefix("#").strip() for line in comment if not line.startswith(left_out))
    return text.partition("Runs: ")[0].strip()


def parse(content: Mapping[Any, Any], where: str = "study") -> Study:
    """Return the study that a file's content describes; `where` names the file in errors.

    Raises:
        NALoRAError: all problems of the study's shape; if there are none, all problems of its runs.
    """
    problems = [
        f"{old}: now called {new}; both are given" for old, new in _OLD_NAMES.items() if {old, new} <= {*content}
    ]
    content = {_OLD_NAMES.get(name, name): value for name, value in content.items()}
    problems += shape_problems(content, {field.name for field in dataclasses.fields(Study)} | {"seeds"})
    if not problems:
        seeds = tuple(content.get("seeds", (0,)))
        unchanged = ("validation_size", "generate", "test_limit", "max_batch_tokens")
        study = Study(
            name=str(content.get("name", "study")),
            settings=dict(content["settings"]),
            arms=tuple(_arm(str(name), dict(options or {}), seeds) for name, options in content["arms"].items()),
            over={name: _values(name, values) for name, values in (content.get("over") or {}).items()},
            controls={str(arm): tuple(map(str, others)) for arm, others in (content.get("controls") or {}).items()},
            claims=tuple(map(str, content.get("claims") or ())),
            learning_rates=tuple(float(rate) for rate in content.get(RATES, ())),
            screening_seeds=tuple(content.get("screening_seeds", (0,))),
            drop_rates_worse_than=None if (margin := content.get(MARGIN)) is None else float(margin),
            **{name: content[name] for name in unchanged if name in content},
        )
        problems = _run_problems(study)
    if problems:
        raise SettingsError(where, problems)
    return study


def _arm(name: str, options: dict[str, Any], seeds: tuple[int, ...]) -> Arm:
    rates, own_seeds = options.pop(RATES, ()), options.pop("seeds", seeds)
    return Arm(name, options, tuple(map(float, rates)), tuple(own_seeds))


def _values(name: str, values: Any) -> tuple[Any, ...] | dict[str, dict[str, Any]]:
    """Return the values of a setting in `over`, under names if some are lists, since a key must be hashable."""
    if isinstance(values, dict):
        return values
    if any(isinstance(value, list | dict) for value in values):
        return {str(value): {name: value} for value in values}
    return tuple(values)


def _run_problems(study: Study) -> list[str]:
    """Check one run of every arm in every combination."""
    problems = ["arms: two have the same name"] if len({arm.name for arm in study.arms}) < len(study.arms) else []
    for combination in study.combinations():
        for arm in study.arms_in(combination):
            if not arm.learning_rates:
                problems.append(f"arm {arm.name}: no learning rates")
                continue
            with collecting(problems):
                study.run(combination, arm, arm.learning_rates[0], arm.seeds[0])
    return list(dict.fromkeys(problems))
