"""What a study came to: a table for every combination of settings, and a plain sentence for every claim."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from nalora.evaluation.significance import FEWEST_SEEDS, Comparison, compare_methods
from nalora.files import atomic, outputs
from nalora.report.tables import Column, Record, Table, escape_markdown, markdown, tabulate
from nalora.studies import alike
from nalora.studies.alike import LOSS, is_loss
from nalora.studies.job import Job
from nalora.studies.schedule import Cell, Schedule, is_screened
from nalora.studies.store import ANSWERS, TEST, VALIDATION, Result
from nalora.studies.study import Study
from nalora.studies.withheld import (
    LostRun,
    Pair,
    diverged_seeds,
    diverged_with_a_seed,
    of_lost_runs,
    without_results,
)


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
    not_compared: tuple[str, ...] = ()  # a sentence for each comparison that is not made
    failed: Mapping[str, tuple[float, ...]] = {}  # the rates of each arm whose runs failed: their losses are not known
    dropped: Mapping[str, tuple[float, ...]] = {}  # of each arm, the rates trained with one screening seed
    questions: tuple[str, ...] = ()  # sentences on results that are not of the same questions
    lost: Mapping[str, tuple[LostRun, ...]] = {}  # of each arm that lacks some, the runs that failed
    diverged: tuple[str, ...] = ()  # arms of which every learning rate diverged

    @property
    def heading(self) -> str:
        """The combination of settings; empty where the study has one alone."""
        return ", ".join(f"{name} {value}" for name, value in self.settings.items())

    def notes(self) -> list[str]:
        """What a reader must know of the choice of rates and of what is missing."""
        told = (
            ("At an end of the rates tried, and perhaps better beyond it", self.at_the_end),
            ("Learning rates dropped after the first screening seed, whose validation loss is shown", self._dropped()),
            ("Diverged with every learning rate", self.diverged),
            ("Not complete", self.missing),
        )
        return [
            *(f"{what}: {'; '.join(arms)}." for what, arms in told if arms),
            *of_lost_runs(self.lost),
            *self.questions,
        ]

    def _dropped(self) -> list[str]:
        return [f"{arm} at {', '.join(f'{rate:g}' for rate in rates)}" for arm, rates in self.dropped.items()]

    def sentences(self) -> list[str]:
        """What may be said."""
        told = [*self.comparisons.items(), *self.controls.items()]
        return [each.sentence(measure) for measure, found in told for each in found] + list(self.not_compared)


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
    diverged = [cell.arm.name for cell in cells if schedule.diverged(cell, results)]
    missing = []
    finished: list[tuple[Cell, Job, Result]] = []
    for cell in cells:
        rate = rates[cell.arm.name] = schedule.chosen_rate(cell, results)
        jobs = schedule.final(cell, rate) if rate is not None else []
        found = [(job, results[job.key]) for job in jobs if job.key in results and results[job.key].has(TEST)]
        whole = sum(all(result.has(part) for part in job.parts) for job, result in found)
        if whole < len(cell.arm.seeds) and cell.arm.name not in diverged:
            missing.append(cell.arm.name)
        finished += [(cell, job, result) for job, result in found]
    seeds_of = {job.key: job.settings["seed"] for _, job, _ in finished}
    suffix, answers = (
        alike.suffixes(
            {
                job.key: result.asked.get(part, "")
                for _, job, result in finished
                if result.has(part) and not result.diverged
            },
            seeds_of,
        )
        for part in (TEST, ANSWERS)
    )
    for cell, job, result in finished:
        measures = _measures(result, suffix.get(job.key, ""), answers.get(job.key, ""))
        records.append(Record(cell.arm.name, job.settings["seed"], measures))
    names = list(dict.fromkeys(name for record in records for name in record.measures))
    records = [_with_all_measures(record, names) for record in records]
    shares = {name: _is_share(name, records) for name in names}
    columns = [Column(name, lower=is_loss(name), scale=100.0 if shares[name] else 1.0,
                      title=f"{name} %" if shares[name] else name) for name in names]  # fmt: skip
    table = tabulate(records, columns, unranked=missing)
    values = {name: _values(records, name) for name in names}
    baseline = schedule.study.baseline
    others = [(cell.arm.name, baseline) for cell in cells if cell.arm.name != baseline]
    pairs = [(arm, control) for arm, controls in schedule.study.controls.items() for control in controls]
    lost = {
        cell.arm.name: tuple(LostRun(job.key, job.label, failed[job.key]) for job in jobs)
        for cell in cells
        if (jobs := schedule.lost(cell, results, failed))
    }
    not_compared = [
        *(
            told
            for each in (others, pairs)
            for name in names
            for told in diverged_with_a_seed(values[name], each, name)
        ),
        *without_results([*others, *pairs], lost, diverged),
    ]
    seeds = {cell.arm.name: {*cell.arm.seeds} for cell in cells}
    # Some of an arm's seeds would give another verdict than all of them, by chance or because of what was lost.
    values = {name: {arm: each[arm] for arm in each if arm not in missing} for name, each in values.items()}
    comparisons = {name: _compared(each, others, seeds, name) for name, each in values.items()
                   if baseline in each and not diverged_seeds(each[baseline])}  # fmt: skip
    controls = {name: _compared(each, pairs, seeds, name) for name, each in values.items()}
    at_the_end = [cell.arm.name for cell in cells if _is_at_the_end(rates[cell.arm.name], cell.arm.learning_rates)]
    return Part(
        settings,
        table,
        comparisons,
        rates,
        tuple(missing),
        tuple(at_the_end),
        {cell.arm.name: schedule.screened(cell, results) for cell in cells},
        {name: beside for name, beside in controls.items() if beside},
        tuple(dict.fromkeys(not_compared)),
        {cell.arm.name: _failed_rates(schedule, cell, results, failed) for cell in cells},
        {cell.arm.name: dropped for cell in cells if (dropped := schedule.dropped_rates(cell, results))},
        tuple(_notes_on_questions(schedule, cells, results, finished)),
        lost,
        tuple(diverged),
    )


def _measures(result: Result, of_loss: str, of_answers: str) -> dict[str, float]:
    """The run's numbers by the names of their columns, which say of which questions they are where that differs.

    Of a diverged run an infinite test loss, also where the task has none, so that it is not overlooked.
    """
    loss = result.losses[TEST]
    losses = {} if math.isnan(loss) else {LOSS + of_loss: loss}
    return losses | {name + of_answers: value for name, value in result.measures.items()}


def _with_all_measures(record: Record, names: Sequence[str]) -> Record:
    """With NaN for what a diverged run has not: a mean over the other seeds would flatter the arm."""
    if record.measures.get(LOSS) != math.inf:
        return record
    return record._replace(measures={name: record.measures.get(name, math.nan) for name in names})


def _notes_on_questions(
    schedule: Schedule, cells: list[Cell], results: Mapping[str, Result], finished: Sequence[tuple[Cell, Job, Result]]
) -> list[str]:
    asked = [(job.settings["seed"], result.asked.get(TEST, "")) for _, job, result in finished if not result.diverged]
    screened = [
        (job.settings["seed"], results[job.key].asked.get(VALIDATION, ""))
        for cell in cells
        for job in schedule.screening(cell)
        if job.key in results and not results[job.key].diverged
    ]
    return alike.notes(asked, screened)


def _failed_rates(
    schedule: Schedule, cell: Cell, results: Mapping[str, Result], failed: Mapping[str, str]
) -> tuple[float, ...]:
    lost = {key for key in failed if not is_screened(key, results)}
    return tuple(
        rate for rate in cell.arm.learning_rates if not lost.isdisjoint(schedule.screening_keys(cell, rate, results))
    )


def _is_at_the_end(rate: float | None, tried: tuple[float, ...]) -> bool:
    """A single rate was given, not chosen; of two each is an end."""
    return rate is not None and len(tried) > 1 and rate in (min(tried), max(tried))


def _is_share(measure: str, records: list[Record]) -> bool:
    """A loss is none, nor is a judge's rating from 1 to 10."""
    return not is_loss(measure) and all(
        abs(value) <= 1 for each in records if math.isfinite(value := each.measures.get(measure, 0.0))
    )


def _values(records: list[Record], measure: str) -> dict[str, dict[int, float]]:
    """By arm and seed, those included that are no finite number."""
    values: dict[str, dict[int, float]] = {}
    for label, seed, measures in records:
        if measure in measures:
            values.setdefault(label, {})[seed] = measures[measure]
    return values


def _compared(
    values: Mapping[str, Mapping[int, float]], pairs: Sequence[Pair], seeds: Mapping[str, set[int]], measure: str
) -> list[Comparison]:
    """The pairs of which both are known and neither diverged: a mean over the seeds that went well would flatter."""
    finite = {arm: by_seed for arm, by_seed in values.items() if not diverged_seeds(by_seed)}
    known = [pair for pair in pairs if finite.keys() >= {*pair}]
    planned = sum(len(seeds[arm] & seeds[baseline]) >= FEWEST_SEEDS for arm, baseline in pairs)
    return compare_methods(finite, known, higher_is_better=not is_loss(measure), planned=planned)


def in_markdown(study: Study, parts: list[Part]) -> str:
    """The answer as a page."""
    lines = [f"<!-- {outputs.TEXT} -->\n", f"# {escape_markdown(study.name)}\n"]
    for part in parts:
        if part.heading:
            lines.append(f"## {escape_markdown(part.heading)}\n")
        if part.table.rows:
            lines += [markdown(part.table)]
        lines += ["| arm | learning rate: validation loss |", "|---|---|"]
        lines += [f"| {escape_markdown(arm)} | {_in_a_row(part, arm)} |" for arm in part.screening] + [""]
        lines += [f"{escape_markdown(note)}\n" for note in part.notes()]
        lines += [f"- {escape_markdown(each)}" for each in part.sentences()] + [""]
    if missing := {run.key for part in parts for runs in part.lost.values() for run in runs}:
        lines.append(f"{len(missing)} run(s) are missing because they failed.")
    return "\n".join(lines)


def _in_a_row(part: Part, arm: str) -> str:
    """The rates of an arm with what each came to; the chosen one stands out."""
    dropped = part.dropped.get(arm, ())
    told = {
        rate: f"{rate:g}: {_shown(loss)}{' (dropped)' if rate in dropped else ''}"
        for rate, loss in _known_losses(part, arm).items()
    }
    return ", ".join(f"**{text}**" if rate == part.rates[arm] else text for rate, text in told.items())


def _known_losses(part: Part, arm: str) -> dict[float, float | Literal["missing"] | None]:
    """The validation losses of an arm's rates; a run that failed has none, unlike one that diverged."""
    failed = part.failed.get(arm, ())
    return {rate: "missing" if rate in failed else loss for rate, loss in part.screening[arm].items()}


def _written_losses(part: Part, arm: str) -> dict[float, float | str | None]:
    """The same for a file: JSON has no infinity, which is the loss of a run that diverged."""
    known = _known_losses(part, arm)
    return {
        rate: "diverged" if isinstance(loss, float) and not math.isfinite(loss) else loss
        for rate, loss in known.items()
    }


def _shown(loss: float | str | None) -> str:
    if loss is None:
        return "–"
    return loss if isinstance(loss, str) else f"{loss:.4f}"


def refuse_foreign_files(study: Study, folder: Path) -> None:
    """Refuse a store in which the files of the answer are somebody else's.

    Raises:
        NALoRAError: they are.
    """
    page, numbers = _files(study, folder)
    heading = f"# {study.name}\n".encode()
    # Version 0.1 wrote the page without a comment.
    outputs.refuse_foreign_files(
        [page], lambda head: outputs.is_text(head) or head.startswith(heading), option="--store", kind="an answer"
    )
    outputs.refuse_foreign_files(
        [numbers], lambda head: b'"learning_rates"' in head, option="--store", kind="an answer"
    )


def _files(study: Study, folder: Path) -> tuple[Path, Path]:
    """The page and its numbers."""
    return folder / f"{study.name}.md", folder / f"{study.name}.json"


def write(study: Study, parts: list[Part], folder: Path) -> Path:
    """Keep the answer as a page and as numbers beside the runs; the page's path."""
    refuse_foreign_files(study, folder)
    page, numbers = _files(study, folder)
    atomic.write(page, in_markdown(study, parts))
    content = [
        {
            "settings": part.settings,
            "learning_rates": part.rates,
            "at_the_end_of_the_rates": part.at_the_end,
            "validation_losses": {arm: _written_losses(part, arm) for arm in part.screening},
            # Only in studies that drop rates, so that the answers of all others stay as they are.
            **({"dropped_learning_rates": part.dropped} if part.dropped else {}),
            "missing": part.missing,
            **({"missing_runs": _as_rows(part.lost)} if part.lost else {}),
            "values": {label: [dict(cell.values) for cell in cells] for label, cells in part.table.rows.items()},
            "measures": [column.measure for column in part.table.columns],
            "comparisons": _as_numbers(part.comparisons),
            "controls": _as_numbers(part.controls),
            "sentences": part.sentences(),
        }
        for part in parts
    ]
    atomic.write(numbers, atomic.json_text(content, indent=2, default=str) + "\n")
    return page


def _as_rows(lost: Mapping[str, Sequence[LostRun]]) -> list[dict[str, str]]:
    return [{"arm": arm, **run._asdict()} for arm, runs in lost.items() for run in runs]


def _as_numbers(comparisons: Mapping[str, list[Comparison]]) -> dict[str, list[dict[str, Any]]]:
    return {name: [each.numbers() for each in found] for name, found in comparisons.items()}
