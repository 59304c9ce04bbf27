"""The results of a study, made by `studies.answer` and rendered as Markdown, as numbers for a file and as HTML."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import count
from typing import Any, Literal, NamedTuple

from nalora.evaluation.significance import Comparison
from nalora.files import outputs
from nalora.report import sections
from nalora.report.tables import Table, escape_markdown, markdown

# Infinite where a run diverged, "missing" where it failed, None where it has not finished yet.
Loss = float | Literal["missing"] | None


class LostRun(NamedTuple):
    """A run that an arm's results need and that failed."""

    key: str
    label: str
    error: str


@dataclass(frozen=True)
class AnswerPart:
    """The results of one combination of a study's settings."""

    settings: Mapping[str, Any]  # the combination; empty where the study has only one
    table: Table  # means over seeds
    sentences: Sequence[str] = ()  # the conclusions, and why a comparison is not made
    notes: Sequence[str] = ()  # limitations: chosen rates at the end of their grid, missing runs
    screening: Mapping[str, Mapping[float, Loss]] = field(default_factory=dict)  # validation losses by arm and rate
    rates: Mapping[str, float | None] = field(default_factory=dict)  # the learning rate chosen for each arm
    comparisons: Mapping[str, Sequence[Comparison]] = field(default_factory=dict)  # with the baseline, by measure
    controls: Mapping[str, Sequence[Comparison]] = field(default_factory=dict)  # corrected as a separate family
    missing: Sequence[str] = ()  # arms without all of their runs
    at_the_end: Sequence[str] = ()  # arms whose chosen learning rate is the lowest or the highest tried
    dropped: Mapping[str, Sequence[float]] = field(default_factory=dict)  # rates trained with one screening seed only
    lost: Mapping[str, Sequence[LostRun]] = field(default_factory=dict)  # the failed runs of each arm that has any
    shown: Mapping[str, str] = field(default_factory=dict)  # the key of the run that represents each arm in a report

    @property
    def heading(self) -> str:
        """The combination of settings; empty where the study has only one."""
        return ", ".join(f"{name} {value}" for name, value in self.settings.items())

    def markdown(self) -> list[str]:
        """Return lines: the table, the choice of learning rates, notes and conclusions."""
        lines = [f"## {escape_markdown(self.heading)}\n"] if self.heading else []
        lines += [markdown(self.table)] if self.table.rows else []
        lines += ["| arm | learning rate: validation loss |", "|---|---|"]
        lines += [f"| {escape_markdown(arm)} | {self._screening_of(arm)} |" for arm in self.screening] + [""]
        lines += [f"{escape_markdown(note)}\n" for note in self.notes]
        return [*lines, *(f"- {escape_markdown(sentence)}" for sentence in self.sentences), ""]

    def _screening_of(self, arm: str) -> str:
        """Return the rates of an arm with the validation loss of each, the chosen one bold."""
        cells = []
        for rate, loss in self.screening[arm].items():
            shown = "–" if loss is None else loss if isinstance(loss, str) else f"{loss:.4f}"
            text = f"{rate:g}: {shown}{' (dropped)' if rate in self.dropped.get(arm, ()) else ''}"
            cells.append(f"**{text}**" if rate == self.rates[arm] else text)
        return ", ".join(cells)

    def numbers(self) -> dict[str, Any]:
        """Return the numbers for a file. JSON has no infinity, which is the loss of a run that diverged."""
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
            # Only in studies that drop rates, so that stored answers of all others stay the same.
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
        """Return the table and the notes as HTML."""
        heading = f"<h3>{escape(self.heading)}</h3>" if self.heading else ""
        marks = {"best": " (best)", "second": " (second)", "": ""}
        rows = [[arm, *(f"{text}{marks[mark]}" for text, mark in cells)] for arm, cells in self.table.texts()]
        heads = ["arm", *(column.head for column in self.table.columns)]
        # Marks are words, for screen readers.
        caption = self.table.caption.replace("Bold:", "(best):").replace("underlined:", "(second):")
        shown = sections.table(heads, rows, caption, numbers=True) if rows else ""
        return heading + shown + sections.notes(self.notes)


@dataclass(frozen=True)
class StudyAnswer:
    """The results of a study: a part for each combination of its settings."""

    name: str
    baseline: str  # the arm that the others are compared with
    parts: Sequence[AnswerPart]
    question: str = ""  # the description in the study's file

    def arms(self) -> list[str]:
        """Return the names of all arms."""
        names = [name for part in self.parts for name in (*part.rates, *part.screening)]
        return list(dict.fromkeys([self.baseline, *names]))

    def markdown(self) -> str:
        """Return all results as a page of Markdown."""
        lines = [f"<!-- {outputs.TEXT} -->\n", f"# {escape_markdown(self.name)}\n"]
        lines += [line for part in self.parts for line in part.markdown()]
        if lost := {run.key for part in self.parts for runs in part.lost.values() for run in runs}:
            lines.append(f"{len(lost)} run(s) are missing because they failed.")
        return "\n".join(lines)

    def tables(self) -> str:
        """Return the question and a table for each part as HTML, to be shown above the charts."""
        question = f"<p>{escape(self.question)}</p>" if self.question else ""
        return question + "".join(part.html() for part in self.parts)

    def sentences(self) -> str:
        """Return the conclusions of each part as HTML, to be shown below the charts."""
        return "".join(
            f"<h3>{escape(part.heading or 'Conclusions')}</h3>{sections.items(part.sentences)}"
            for part in self.parts
            if part.sentences
        )

    def charts(self) -> dict[str, Any]:
        """Return the data of the page's charts; the page shows the runs of `AnswerPart.shown`, in their order."""
        places = count()
        return {"baseline": self.baseline, "parts": [_charts(part, places) for part in self.parts]}


def _charts(part: AnswerPart, places: count[int]) -> dict[str, Any]:
    lost = {run.key: run.label for runs in part.lost.values() for run in runs}
    differences, controls = (
        {measure: list(map(_difference, family)) for measure, family in families.items()}
        for families in (part.comparisons, part.controls)
    )
    return {
        "heading": part.heading,
        "rates": dict(part.rates),
        "shown": {arm: next(places) for arm in part.shown},
        "screening": {
            arm: [[rate, None if loss == "missing" else loss] for rate, loss in by_rate.items()]
            for arm, by_rate in part.screening.items()
        },
        "differences": differences,
        "controls": controls,
        **({"missing": list(lost.values())} if lost else {}),
    }


def _difference(comparison: Comparison) -> dict[str, Any]:
    return {
        "arm": comparison.method, "control": comparison.baseline, "value": comparison.difference,
        "interval": comparison.interval, "seeds": comparison.seeds, "verdict": comparison.verdict,
    }  # fmt: skip
