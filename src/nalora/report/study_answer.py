"""What a study came to, as a report shows it: first of all, before any single run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, NamedTuple

from nalora.report import words
from nalora.report.packing import finite
from nalora.report.tables import Table


class Difference(NamedTuple):
    """An arm beside another, paired by seed; without an interval where there is one seed."""

    arm: str
    beside: str
    value: float
    interval: tuple[float, float] | None
    seeds: int
    verdict: str


@dataclass(frozen=True)
class AnswerPart:
    """One combination of a study's settings.

    Attributes:
        heading: the combination; empty where the study has one alone.
        table: means over seeds.
        sentences: what may be said.
        notes: what the reader must know: rates at the end of their grid, runs that are missing.
        screening: validation losses by arm and learning rate, None where a run is missing.
        rates: the learning rate chosen for each arm.
        differences: from the baseline, by measure.
        controls: from what an arm must beat as well, by measure.
        shown: which of the report's runs stands for an arm.
        missing: the names of runs that failed and that the answer lacks.
    """

    heading: str
    table: Table
    sentences: Sequence[str]
    notes: Sequence[str]
    screening: Mapping[str, Mapping[float, float | None]]
    rates: Mapping[str, float | None]
    differences: Mapping[str, Sequence[Difference]]
    controls: Mapping[str, Sequence[Difference]]
    shown: Mapping[str, int]
    missing: Sequence[str] = ()


@dataclass(frozen=True)
class StudyAnswer:
    """A study's answer.

    Attributes:
        name: of the study.
        question: what its file says that it asks.
        baseline: the arm that the others are compared with.
        parts: one for each combination of settings.
    """

    name: str
    question: str
    baseline: str
    parts: Sequence[AnswerPart]

    def arms(self) -> list[str]:
        """Every arm by name."""
        found = [name for part in self.parts for name in (*part.rates, *part.screening)]
        return list(dict.fromkeys([self.baseline, *found]))

    def tables(self) -> str:
        """What is asked, and a table for each part, as HTML; the charts stand below it."""
        question = f"<p>{escape(self.question)}</p>" if self.question else ""
        return question + "".join(map(_table, self.parts))

    def sentences(self) -> str:
        """What may be said of each part, as HTML; it stands below the charts."""
        told = [part for part in self.parts if part.sentences]
        return "".join(f"<h3>{escape(part.heading or 'In words')}</h3>{words.items(part.sentences)}" for part in told)

    def numbers(self) -> dict[str, Any]:
        """What the page's charts are drawn from."""
        return {
            "baseline": self.baseline,
            "parts": [
                {
                    "heading": part.heading,
                    "rates": finite(dict(part.rates)),
                    "shown": dict(part.shown),
                    "screening": {
                        arm: [[rate, finite(loss)] for rate, loss in losses.items()]
                        for arm, losses in part.screening.items()
                    },
                    "differences": _numbers(part.differences),
                    "controls": _numbers(part.controls),
                    **({"missing": list(part.missing)} if part.missing else {}),
                }
                for part in self.parts
            ],
        }


def _table(part: AnswerPart) -> str:
    heading = f"<h3>{escape(part.heading)}</h3>" if part.heading else ""
    marks = {"best": " (best)", "second": " (second)", "": ""}
    rows = [[arm, *(f"{text}{marks[mark]}" for text, mark in cells)] for arm, cells in part.table.texts()]
    heads = ["arm", *(column.head for column in part.table.columns)]
    # A page's marks are words, which a screen reader reads as well.
    caption = part.table.caption.replace("Bold:", "(best):").replace("underlined:", "(second):")
    shown = words.table(heads, rows, caption, numbers=True) if rows else ""
    return heading + shown + words.notes(part.notes)


def _numbers(differences: Mapping[str, Sequence[Difference]]) -> dict[str, list[dict[str, Any]]]:
    return {
        measure: [{**each._asdict(), "value": finite(each.value), "interval": finite(each.interval)} for each in found]
        for measure, found in differences.items()
    }
