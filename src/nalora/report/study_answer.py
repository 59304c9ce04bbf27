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
    """An arm beside the baseline, paired by seed; without an interval where there is one seed."""

    arm: str
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
        shown: which of the report's runs stands for an arm.
    """

    heading: str
    table: Table
    sentences: Sequence[str]
    notes: Sequence[str]
    screening: Mapping[str, Mapping[float, float | None]]
    rates: Mapping[str, float | None]
    differences: Mapping[str, Sequence[Difference]]
    shown: Mapping[str, int]


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

    def words(self, part: AnswerPart) -> str:
        """A part's table and sentences as HTML."""
        heading = f"<h3>{escape(part.heading)}</h3>" if part.heading else ""
        marks = {"best": " (best)", "second": " (second)", "": ""}
        rows = [[arm, *(f"{text}{marks[mark]}" for text, mark in cells)] for arm, cells in part.table.texts()]
        heads = ["arm", *(column.head for column in part.table.columns)]
        shown = words.table(heads, rows, part.table.caption, numbers=True) if rows else ""
        return heading + shown + (words.items(part.sentences) if part.sentences else "") + words.notes(part.notes)

    def html(self) -> str:
        """All that is words; the charts stand below it."""
        question = f"<p>{escape(self.question)}</p>" if self.question else ""
        return question + "".join(self.words(part) for part in self.parts)

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
                    "differences": {
                        measure: [
                            {**each._asdict(), "value": finite(each.value), "interval": finite(each.interval)}
                            for each in found
                        ]
                        for measure, found in part.differences.items()
                    },
                }
                for part in self.parts
            ],
        }
