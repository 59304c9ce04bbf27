"""What a study came to: a table for every combination of settings, and a plain sentence for every claim."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from nalora.report.tables import Column, Record, Table, markdown, tabulate
from nalora.studies.comparison import Comparison, compare, compare_pairs, sentence
from nalora.studies.schedule import Cell, Schedule
from nalora.studies.store import TEST, Result
from nalora.studies.study import Study
from nalora.training.folder import write_json

LOSS = "test loss"


class Part(NamedTuple):
    """The results of one combination of settings."""

    settings: dict[str, Any]
    table: Table
    comparisons: dict[str, list[Comparison]]  # by measure
    rates: dict[str, float | None]  # the learning rate chosen for each arm
    missing: tuple[str, ...]  # arms without all of their runs
    at_the_end: tuple[str, ...] = ()  # arms whose chosen learning rate is the lowest or the highest that was tried
    screening: Mapping[str, Mapping[float, float | None]] = {}  # validation losses of each arm's rates, as far as known
    controls: Mapping[str, list[Comparison]] = {}  # by measure: arms beside what they must beat, a family of their own

    @property
    def heading(self) -> str:
        """The combination of settings; empty where the study has one alone."""
        return ", ".join(f"{name} {value}" for name, value in self.settings.items())

    def notes(self) -> list[str]:
        """What a reader must know of the choice of rates and of what is missing."""
        told = (
            ("At an end of the rates tried, and perhaps better beyond it", self.at_the_end),
            ("Not complete", self.missing),
        )
        return [f"{what}: {'; '.join(arms)}." for what, arms in told if arms]

    def sentences(self) -> list[str]:
        """What may be said."""
        told = [*self.comparisons.items(), *self.controls.items()]
        return [sentence(each, measure) for measure, found in told for each in found]


def answer(schedule: Schedule, results: Mapping[str, Result], failed: Mapping[str, str]) -> list[Part]:
    """Every combination of the study, as far as it is known."""
    combinations: dict[tuple[tuple[str, Any], ...], list[Cell]] = {}
    for cell in schedule.cells:
        combinations.setdefault(cell.settings, []).append(cell)
    return [_part(schedule, dict(settings), cells, results, failed) for settings, cells in combinations.items()]


def _part(
    schedule: Schedule,
    settings: dict[str, Any],
    cells: list[Cell],
    results: Mapping[str, Result],
    failed: Mapping[str, str],
) -> Part:
    records: list[Record] = []
    rates: dict[str, float | None] = {}
    missing = []
    for cell in cells:
        rate = rates[cell.arm.name] = schedule.chosen_rate(cell, results, failed)
        jobs = schedule.final(cell, rate) if rate is not None else []
        found = [(job, results[job.key]) for job in jobs if job.key in results and results[job.key].has(TEST)]
        if len(found) < len(cell.arm.seeds):
            missing.append(cell.arm.name)
        for job, result in found:
            loss = result.losses[TEST]
            measures = {**({} if math.isnan(loss) else {LOSS: loss}), **result.measures}
            records.append(Record(cell.arm.name, job.settings["seed"], measures))
    names = list(dict.fromkeys(name for record in records for name in record.measures))
    shares = {name: _is_share(name, records) for name in names}
    columns = [Column(name, lower=name == LOSS, scale=100.0 if shares[name] else 1.0,
                      title=f"{name} %" if shares[name] else name) for name in names]  # fmt: skip
    table = tabulate(records, columns)
    baseline = schedule.study.baseline
    values = {name: _values(records, name) for name in names}
    comparisons = {name: compare(each, baseline, higher_is_better=name != LOSS)
                   for name, each in values.items() if baseline in each}  # fmt: skip
    pairs = [(arm, control) for arm, controls in schedule.study.controls.items() for control in controls]
    beside = {name: [pair for pair in pairs if each.keys() >= {*pair}] for name, each in values.items()}
    controls = {name: compare_pairs(values[name], known, higher_is_better=name != LOSS)
                for name, known in beside.items() if known}  # fmt: skip
    at_the_end = [cell.arm.name for cell in cells if _is_at_the_end(rates[cell.arm.name], cell.arm.learning_rates)]
    screening = {cell.arm.name: schedule.screened(cell, results, failed) for cell in cells}
    return Part(settings, table, comparisons, rates, tuple(missing), tuple(at_the_end), screening, controls)


def _is_at_the_end(rate: float | None, tried: tuple[float, ...]) -> bool:
    """A single rate was given, not chosen; of two each is an end."""
    return rate is not None and len(tried) > 1 and rate in (min(tried), max(tried))


def _is_share(measure: str, records: list[Record]) -> bool:
    """A loss is none, nor is a judge's rating from 1 to 10."""
    return measure != LOSS and all(abs(each.measures.get(measure, 0.0)) <= 1 for each in records)


def _values(records: list[Record], measure: str) -> dict[str, dict[int, float]]:
    """By arm and seed; a run that diverged is no number that a mean could be of."""
    values: dict[str, dict[int, float]] = {}
    for label, seed, measures in records:
        if math.isfinite(measures.get(measure, math.nan)):
            values.setdefault(label, {})[seed] = measures[measure]
    return values


def in_markdown(study: Study, parts: list[Part], failed: Mapping[str, str]) -> str:
    """The answer as a page."""
    lines = [f"# {study.name}\n"]
    for part in parts:
        if part.heading:
            lines.append(f"## {part.heading}\n")
        if part.table.rows:
            lines += [markdown(part.table)]
        lines += ["| arm | learning rate: validation loss |", "|---|---|"]
        lines += [f"| {arm} | {_in_a_row(losses, part.rates[arm])} |" for arm, losses in part.screening.items()] + [""]
        lines += [f"{note}\n" for note in part.notes()]
        lines += [f"- {each}" for each in part.sentences()] + [""]
    if failed:
        lines.append(f"{len(failed)} run(s) failed.")
    return "\n".join(lines)


def _in_a_row(losses: Mapping[float, float | None], chosen: float | None) -> str:
    """The rates of an arm with what each came to; the chosen one stands out."""
    told = {rate: f"{rate:g}: {'–' if loss is None else f'{loss:.4f}'}" for rate, loss in losses.items()}
    return ", ".join(f"**{text}**" if rate == chosen else text for rate, text in told.items())


def write(study: Study, parts: list[Part], failed: Mapping[str, str], folder: Path) -> Path:
    """Keep the answer as a page and as numbers beside the runs; the page's path."""
    page = folder / f"{study.name}.md"
    page.write_text(in_markdown(study, parts, failed), encoding="utf-8")
    content = [
        {
            "settings": part.settings,
            "learning_rates": part.rates,
            "at_the_end_of_the_rates": part.at_the_end,
            "validation_losses": part.screening,
            "missing": part.missing,
            "values": {label: [dict(cell.values) for cell in cells] for label, cells in part.table.rows.items()},
            "measures": [column.measure for column in part.table.columns],
            "comparisons": _as_numbers(part.comparisons),
            "controls": _as_numbers(part.controls),
            "sentences": part.sentences(),
        }
        for part in parts
    ]
    write_json(folder / f"{study.name}.json", json.loads(json.dumps(content, default=str)))
    return page


def _as_numbers(comparisons: Mapping[str, list[Comparison]]) -> dict[str, list[dict[str, Any]]]:
    return {name: [each._asdict() for each in found] for name, found in comparisons.items()}
