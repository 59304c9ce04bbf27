"""A study's results: a table for every combination of settings, and a sentence for every comparison."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nalora.evaluation.significance import FEWEST_SEEDS, Comparison, compare_methods
from nalora.files import atomic, outputs
from nalora.report.study_answer import AnswerPart, LostRun, StudyAnswer
from nalora.report.tables import Column, Record, tabulate
from nalora.studies import alike
from nalora.studies.alike import LOSS, is_loss
from nalora.studies.job import Job
from nalora.studies.schedule import Cell, Schedule, is_screened
from nalora.studies.store import ANSWERS, TEST, VALIDATION, Result
from nalora.studies.withheld import Pair, diverged_seeds, diverged_with_a_seed, of_lost_runs, without_results


class _Finished(NamedTuple):
    """A run whose test loss is known."""

    arm: str
    job: Job
    result: Result

    @property
    def seed(self) -> int:
        return int(self.job.settings["seed"])


def answer(schedule: Schedule, results: Mapping[str, Result], failed: Mapping[str, str]) -> StudyAnswer:
    """Every combination of the study's settings, as far as its runs have ended."""
    combinations: dict[tuple[tuple[str, Any], ...], list[Cell]] = {}
    for cell in schedule.cells:
        combinations.setdefault(cell.settings, []).append(cell)
    parts = [_part(schedule, dict(settings), cells, results, failed) for settings, cells in combinations.items()]
    return StudyAnswer(schedule.study.name, schedule.study.baseline, parts)


def _part(
    schedule: Schedule,
    settings: dict[str, Any],
    cells: list[Cell],
    results: Mapping[str, Result],
    failed: Mapping[str, str],
) -> AnswerPart:
    arms = {cell.arm.name: cell for cell in cells}
    rates = {arm: schedule.chosen_rate(cell, results) for arm, cell in arms.items()}
    diverged = [arm for arm, cell in arms.items() if schedule.diverged(cell, results)]
    finished = [
        _Finished(arm, job, results[job.key])
        for arm, cell in arms.items()
        if (rate := rates[arm]) is not None
        for job in schedule.final(cell, rate)
        if job.key in results and results[job.key].has(TEST)
    ]
    whole = [run.arm for run in finished if all(run.result.has(part) for part in run.job.parts)]
    missing = tuple(arm for arm, cell in arms.items() if whole.count(arm) < len(cell.arm.seeds) and arm not in diverged)
    lost = {
        arm: tuple(LostRun(job.key, job.label, failed[job.key]) for job in jobs)
        for arm, cell in arms.items()
        if (jobs := schedule.lost(cell, results, failed))
    }
    dropped = {arm: few for arm, cell in arms.items() if (few := schedule.dropped_rates(cell, results))}
    at_the_end = [arm for arm, cell in arms.items() if _is_at_the_end(rates[arm], cell.arm.learning_rates)]
    records = _records(finished)
    names = list(dict.fromkeys(name for record in records for name in record.measures))
    values = {name: _values(records, name) for name in names}
    baseline = schedule.study.baseline
    others = [(arm, baseline) for arm in arms if arm != baseline]
    pairs = [(arm, control) for arm, controls in schedule.study.controls.items() for control in controls]
    not_compared = [
        *(
            sentence
            for family in (others, pairs)
            for name in names
            for sentence in diverged_with_a_seed(values[name], family, name)
        ),
        *without_results([*others, *pairs], lost, diverged),
    ]
    seeds = {arm: {*cell.arm.seeds} for arm, cell in arms.items()}
    # Some of an arm's seeds would give another verdict than all of them, by chance or because of what was lost.
    values = {name: {arm: of[arm] for arm in of if arm not in missing} for name, of in values.items()}
    comparisons = {name: _compared(of, others, seeds, name) for name, of in values.items()
                   if baseline in of and not diverged_seeds(of[baseline])}  # fmt: skip
    controls = {name: found for name, of in values.items() if (found := _compared(of, pairs, seeds, name))}
    listed = (
        ("At an end of the rates tried, and perhaps better beyond it", at_the_end),
        (
            "Learning rates dropped after the first screening seed, whose validation loss is shown",
            [f"{arm} at {', '.join(f'{rate:g}' for rate in of_arm)}" for arm, of_arm in dropped.items()],
        ),
        ("Diverged with every learning rate", diverged),
        ("Not complete", missing),
    )
    claims = [one.sentence(name) for of in (comparisons, controls) for name, found in of.items() for one in found]
    return AnswerPart(
        settings,
        tabulate(records, _columns(names, records), unranked=missing),
        sentences=[*claims, *dict.fromkeys(not_compared)],
        notes=[
            *(f"{what}: {'; '.join(items)}." for what, items in listed if items),
            *of_lost_runs(lost),
            *_notes_on_questions(schedule, cells, results, finished),
        ],
        screening={arm: _screening(schedule, cell, results, failed) for arm, cell in arms.items()},
        rates=rates,
        comparisons=comparisons,
        controls=controls,
        missing=missing,
        at_the_end=at_the_end,
        dropped=dropped,
        lost=lost,
        shown={arm: key for arm, cell in arms.items() if (key := _shown(schedule, cell, results)) is not None},
    )


def _records(finished: Sequence[_Finished]) -> list[Record]:
    """The numbers of each run by the names of their columns, which say of which questions they are where that differs.

    A diverged run has an infinite test loss, also where the task has none, so that it is not overlooked, and NaN for
    all that it lacks: a mean over the other seeds would flatter the arm.
    """
    seeds = {run.job.key: run.seed for run in finished}
    of_loss, of_answers = (
        alike.suffixes(
            {
                run.job.key: run.result.asked.get(part, "")
                for run in finished
                if run.result.has(part) and not run.result.diverged
            },
            seeds,
        )
        for part in (TEST, ANSWERS)
    )
    measures = []
    for _, job, result in finished:
        losses = {LOSS + of_loss.get(job.key, ""): result.losses[TEST]}
        answers = {name + of_answers.get(job.key, ""): value for name, value in result.measures.items()}
        measures.append({name: value for name, value in losses.items() if not math.isnan(value)} | answers)
    names = dict.fromkeys(name for known in measures for name in known)
    return [
        Record(run.arm, run.seed, known if known.get(LOSS) != math.inf else dict.fromkeys(names, math.nan) | known)
        for run, known in zip(finished, measures, strict=True)
    ]


def _columns(names: Sequence[str], records: Sequence[Record]) -> list[Column]:
    shares = {name: _is_share(name, records) for name in names}
    return [
        Column(name, f"{name} %" if share else name, lower=is_loss(name), scale=100.0 if share else 1.0)
        for name, share in shares.items()
    ]


def _notes_on_questions(
    schedule: Schedule, cells: list[Cell], results: Mapping[str, Result], finished: Sequence[_Finished]
) -> list[str]:
    asked = [(run.seed, run.result.asked.get(TEST, "")) for run in finished if not run.result.diverged]
    screened = [
        (job.settings["seed"], results[job.key].asked.get(VALIDATION, ""))
        for cell in cells
        for job in schedule.screening(cell)
        if job.key in results and not results[job.key].diverged
    ]
    return alike.notes(asked, screened)


def _screening(
    schedule: Schedule, cell: Cell, results: Mapping[str, Result], failed: Mapping[str, str]
) -> dict[float, Any]:
    """The validation losses of an arm's rates; a run that failed has none, unlike one that diverged."""
    lost = {key for key in failed if not is_screened(key, results)}
    return {
        rate: loss if lost.isdisjoint(schedule.screening_keys(cell, rate, results)) else "missing"
        for rate, loss in schedule.screened(cell, results).items()
    }


def _shown(schedule: Schedule, cell: Cell, results: Mapping[str, Result]) -> str | None:
    """The run that represents an arm: its first seed at the chosen rate, or the best that is known."""
    rate = schedule.chosen_rate(cell, results)
    if rate is not None:
        for job in schedule.final(cell, rate):
            if job.key in results:
                return job.key
    jobs = [job for job in schedule.screening(cell, results) if job.key in results]
    best = min(jobs, key=lambda job: results[job.key].losses.get(VALIDATION, math.inf), default=None)
    return best.key if best else None


def _is_at_the_end(rate: float | None, tried: tuple[float, ...]) -> bool:
    """A single rate was given, not chosen; of two each is an end."""
    return rate is not None and len(tried) > 1 and rate in (min(tried), max(tried))


def _is_share(measure: str, records: Sequence[Record]) -> bool:
    """A loss is none, nor is a judge's rating from 1 to 10."""
    values = [record.measures.get(measure, 0.0) for record in records]
    return not is_loss(measure) and all(abs(value) <= 1 for value in values if math.isfinite(value))


def _values(records: Sequence[Record], measure: str) -> dict[str, dict[int, float]]:
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


def refuse_foreign_files(name: str, folder: Path) -> None:
    """Refuse a store in which the files of a study's answer are somebody else's.

    Raises:
        NALoRAError: they are.
    """
    page, numbers = _files(name, folder)
    heading = f"# {name}\n".encode()
    # Version 0.1 wrote the page without a comment.
    outputs.refuse_foreign_files(
        [page], lambda head: outputs.is_text(head) or head.startswith(heading), option="--store", kind="an answer"
    )
    outputs.refuse_foreign_files(
        [numbers], lambda head: b'"learning_rates"' in head, option="--store", kind="an answer"
    )


def _files(name: str, folder: Path) -> tuple[Path, Path]:
    """The page and its numbers."""
    return folder / f"{name}.md", folder / f"{name}.json"


def write(results: StudyAnswer, folder: Path) -> Path:
    """Write the answer as a page and as numbers next to the runs; the page's path."""
    refuse_foreign_files(results.name, folder)
    page, numbers = _files(results.name, folder)
    atomic.write(page, results.markdown())
    content = [part.numbers() for part in results.parts]
    atomic.write(numbers, atomic.json_text(content, indent=2, default=str) + "\n")
    return page
