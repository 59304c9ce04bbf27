"""Fitted rules in a file that is written before they are judged, and their judgement on cases that they never saw."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from nalora.errors import NALoRAError, counted, missing_path
from nalora.files import atomic
from nalora.studies.rate_rules import FAMILIES, Case, Rule, fit, mean_regret


@dataclass(frozen=True)
class Frozen:
    """Fitted rules by family, the names of the cases that they were fitted on, and a digest of their file."""

    rules: Mapping[str, Rule]
    fitted_on: frozenset[str]
    digest: str


class Judged(NamedTuple):
    """A rule's pick in a case: its regret, and its cost as a share of the grid's."""

    case: str
    rate: float
    best_rate: float
    regret: float
    cost: float


@dataclass(frozen=True)
class Criterion:
    """What counts as success of the rule on trial."""

    regret: float = 0.003
    share_of_cases: float = 0.8
    cost: float = 0.15


@dataclass(frozen=True)
class Verdict:
    """All rules on the cases that no rule was fitted on."""

    judged: Mapping[str, Sequence[Judged]]
    criterion: Criterion

    def mean_regret(self, family: str) -> float:
        """Return the mean regret of a family's rule."""
        return statistics.fmean(pick.regret for pick in self.judged[family])

    def within(self, family: str) -> int:
        """Return the number of cases whose regret is small enough."""
        return sum(pick.regret <= self.criterion.regret for pick in self.judged[family])

    def succeeds(self, family: str) -> bool:
        """Whether a rule is close in enough cases, cheap in all of them, and closer on average than every other."""
        picks = self.judged[family]
        closer = all(self.mean_regret(family) < self.mean_regret(other) for other in self.judged if other != family)
        enough = self.within(family) >= math.ceil(self.criterion.share_of_cases * len(picks))
        return enough and closer and all(pick.cost <= self.criterion.cost for pick in picks)


def freeze(cases: Sequence[Case], file: Path) -> Frozen:
    """Fit the rule of every family and write them to a file, once.

    Raises:
        NALoRAError: the file exists; rules that may have been judged are never replaced.
    """
    if file.exists():
        raise NALoRAError(
            str(file),
            found="rules that were fitted before",
            expected="no such file: rules are fitted once",
            fix="judge them, or move the file away if they have not been judged",
        )
    rules = {family: fit(family, cases) for family in FAMILIES}
    content = {
        "fitted_on": [case.name for case in cases],
        "rules": {
            family: dataclasses.asdict(rule) | {"mean_regret_when_fitted": mean_regret(rule, cases)}
            for family, rule in rules.items()
        },
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    atomic.write(file, atomic.json_text(content, indent=1) + "\n")
    return thaw(file)


def thaw(file: Path) -> Frozen:
    """Return the rules of a file that `freeze` wrote.

    Raises:
        NALoRAError: there is no such file, so that there are no rules to judge yet.
    """
    if not file.is_file():
        raise missing_path("file", file, "rules that were fitted before the judgement", "fit the rules first")
    text = file.read_bytes()
    content = json.loads(text)
    names = {field.name for field in dataclasses.fields(Rule)}
    rules = {
        family: Rule(**{name: value for name, value in rule.items() if name in names})
        for family, rule in content["rules"].items()
    }
    return Frozen(rules, frozenset(content["fitted_on"]), hashlib.sha256(text).hexdigest())


def judge(frozen: Frozen, cases: Sequence[Case], criterion: Criterion | None = None) -> Verdict:
    """Return the picks of frozen rules on other cases.

    Raises:
        NALoRAError: a case that the rules were fitted on, or no case at all.
    """
    seen = [case.name for case in cases if case.name in frozen.fitted_on]
    if seen or not cases:
        raise NALoRAError(
            "judgement of the rules",
            found=f"{counted(len(seen), 'case')} that they were fitted on ({'; '.join(seen)})" if seen else "no case",
            expected="only cases that no rule was fitted on",
            fix="leave out the cases of the fit" if seen else "train the cases of the judgement",
        )
    judged = {
        family: [
            Judged(
                case.name,
                rate := rule.pick(case),
                min(case.rates, key=lambda rate: case.losses[rate]),
                case.regret(rate),
                rule.cost(case),
            )
            for case in cases
        ]
        for family, rule in frozen.rules.items()
    }
    return Verdict(judged, criterion or Criterion())
