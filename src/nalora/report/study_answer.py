"""The answer of a study, built once by `studies.answer`; rendered as Markdown, as numbers for a file and as HTML."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import count
from typing import Any, Literal, NamedTuple

from nalora.evaluation.significance import Comparison
from nalora.files import outputs
from nalora.report import words
from nalora.report.packing import finite
from nalora.report.tables import Table, escape_markdown, markdown

# Infinite where a run diverged, "missing" where it failed, None where it has not ended yet.
Loss = float | Literal["missing"] | None


class LostRun(NamedTuple):
    """A run that an arm's results need and that failed."""

    key: str
    label: str
    error: str


@dataclass(frozen=True)
class AnswerPart:
    """The results of one combination of a study's settings.

    Attributes:
        settings: the combination; empty where the study has one alone.
        table: means over seeds.
        sentences: what may be claimed, and why a comparison is not made.
        notes: what the reader must know: rates at the end of their grid, runs that are missing.
        screening: validation losses by arm and learning rate.
        rates: the learning rate chosen for each arm.
        comparisons: with the baseline, by measure.
        controls: with what an arm must beat as well, by measure; a family of their own.
        missing: arms without all of their runs.
        at_the_end: arms whose chosen learning rate is the lowest or the highest tried.
        dropped: of each arm, the rates trained with one screening seed only.
        lost: of each arm that lacks some, the runs that failed.
        shown: the key of the run that represents each arm in a report.
    """

    settings: Mapping[str, Any]
    table: Table
    sentences: Sequence[str] = ()
    notes: Sequence[str] = ()
    screening: Mapping[str, Mapping[float, Loss]] = field(default_factory=dict)
    rates: Mapping[str, float | None] = field(default_factory=dict)
    comparisons: Mapping[str, Sequence[Comparison]] = field(default_factory=dict)
    controls: Mapping[str, Sequence[Comparison]] = field(default_factory=dict)
    missing: Sequence[str] = ()
    at_the_end: Sequence[str] = ()
    dropped: Mapping[str, Sequence[float]] = field(default_factory=dict)
    lost: Mapping[str, Sequence[LostRun]] = field(default_factory=dict)
    shown: Mapping[str, str] = field(default_factory=dict)

    @property
    def heading(self) -> str:
        """The combination of settings; empty where the study has one alone."""
        return ", ".join(f"{name} {value}" for name, value in self.settings.items())

    def markdown(self) -> list[str]:
        """Lines: the table, the choice of learning rates, notes and claims."""
        lines = [f"## {escape_markdown(self.heading)}\n"] if self.heading else []
        lines += [markdown(self.table)] if self.table.rows else []
        lines += ["| arm | learning rate: validation loss |", "|---|---|"]
        lines += [f"| {escape_markdown(arm)} | {self._screening_of(arm)} |" for arm in self.screening] + [""]
        lines += [f"{escape_markdown(note)}\n" for note in self.notes]
        return [*lines, *(f"- {escape_markdown(sentence)}" for sentence in self.sentences), ""]

    def _screening_of(self, arm: str) -> str:
        """The rates of an arm with the validation loss of each, the chosen one bold."""
        cells = []
        for rate, loss in self.screening[arm].items():
            shown = "–" if loss is None else loss if isinstance(loss, str) else f"{loss:.4f}"
            text = f"{rate:g}: {shown}{' (dropped)' if rate in self.dropped.get(arm, ()) else ''}"
            cells.append(f"**{text}**" if rate == self.rates[arm] else text)
        return ", ".join(cells)

    def numbers(self) -> dict[str, Any]:
        """For a file. JSON has no infinity, which is the loss of a run that diverged."""
        losses = {
            arm: {
                rate: "diverged" if isinstance(loss, float) and not math.isfinite(loss) else loss
                for rate, loss in by_rate.items()
            }
            for arm, by_rate in self.screening.items()
        }
        lost = [{"arm": arm, **run._asdict()} for arm, runs in self.lost.items() for run in runs]
        comparisons, controls = (
            {measure: [comparison.numbers() for comparison in family] for measure, family in families.items()}
            for families in (self.comparisons, self.controls)
        )
        return {
            "settings": self.settings,
            "learning_rates": self.rates,
            "at_the_end_of_the_rates": self.at_the_end,
            "validation_losses": losses,
            # Only in studies that drop rates, so that the answers of all others stay as they are.
            **({"dropped_learning_rates": self.dropped} if self.dropped else {}),
            "missing": self.missing,
            **({"missing_runs": lost} if lost else {}),
            "values": {label: [dict(cell.values) for cell in cells] for label, cells in self.table.rows.items()},
            "measures": [column.measure for column in self.table.columns],
            "comparisons": comparisons,
            "controls": controls,
            "sentences": self.sentences,
        }

    def html(self) -> str:
        """The table and the notes."""
        heading = f"<h3>{escape(self.heading)}</h3>" if self.heading else ""
        marks = {"best": " (best)", "second": " (second)", "": ""}
        rows = [[arm, *(f"{text}{marks[mark]}" for text, mark in cells)] for arm, cells in self.table.texts()]
        heads = ["arm", *(column.head for column in self.table.columns)]
        # A page's marks are words, which a screen reader reads as well.
        caption = self.table.caption.replace("Bold:", "(best):").replace("underlined:", "(second):")
        shown = words.table(heads, rows, caption, numbers=True) if rows else ""
        return heading + shown + words.notes(self.notes)


@dataclass(frozen=True)
class StudyAnswer:
    """A study's answer.

    Attributes:
        name: of the study.
        baseline: the arm that the others are compared with.
        parts: one for each combination of settings.
        question: what the study's file says that it is about.
    """

    name: str
    baseline: str
    parts: Sequence[AnswerPart]
    question: str = ""

    def arms(self) -> list[str]:
        """Every arm by name."""
        names = [name for part in self.parts for name in (*part.rates, *part.screening)]
        return list(dict.fromkeys([self.baseline, *names]))

    def markdown(self) -> str:
        """The whole answer as a page of Markdown."""
        lines = [f"<!-- {outputs.TEXT} -->\n", f"# {escape_markdown(self.name)}\n"]
        lines += [line for part in self.parts for line in part.markdown()]
        if lost := {run.key for part in self.parts for runs in part.lost.values() for run in runs}:
            lines.append(f"{len(lost)} run(s) are missing because they failed.")
        return "\n".join(lines)

    def tables(self) -> str:
        """The question, and a table for each part, as HTML; the charts are below it."""
        question = f"<p>{escape(self.question)}</p>" if self.question else ""
        return question + "".join(part.html() for part in self.parts)

    def sentences(self) -> str:
        """What may be claimed of each part, as HTML; it is below the charts."""
        return "".join(
            f"<h3>{escape(part.heading or 'In words')}</h3>{words.items(part.sentences)}"
            for part in self.parts
            if part.sentences
        )

    def charts(self) -> dict[str, Any]:
        """What the page's charts are drawn from; the page has the runs of `AnswerPart.shown`, in their order."""
        places = count()
        return {"baseline": self.baseline, "parts": [_charts(part, places) for part in self.parts]}


def _charts(part: AnswerPart, places: count[int]) -> dict[str, Any]:
    lost = {run.key: run.label for runs in part.lost.values() for run in runs}
    differences, controls = (
        {
            measure: [
                {
                    "arm": each.method, "beside": each.baseline, "value": finite(each.difference),
                    "interval": finite(each.interval), "seeds": each.seeds, "verdict": each.verdict,
                }
                for each in family
            ]
            for measure, family in families.items()
        }
        for families in (part.comparisons, part.controls)
    )  # fmt: skip
    return {
        "heading": part.heading,
        "rates": finite(dict(part.rates)),
        "shown": {arm: next(places) for arm in part.shown},
        "screening": {
            arm: [[rate, None if loss == "missing" else finite(loss)] for rate, loss in by_rate.items()]
            for arm, by_rate in part.screening.items()
        },
        "differences": differences,
        "controls": controls,
        **({"missing": list(lost.values())} if lost else {}),
    }
