"""A study's results: a table for every combination of settings, and a sentence for every comparison."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nalora.errors import counted
from nalora.evaluation.significance import FEWEST_SEEDS, Comparison, compare_methods
from nalora.files import atomic, outputs
from nalora.report.study_answer import AnswerPart, LostRun, StudyAnswer
from nalora.report.tables import Column, Record, tabulate
from nalora.studies import questions
from nalora.studies.job import Job
from nalora.studies.questions import LOSS, is_loss
from nalora.studies.schedule import Cell, Results, Schedule, is_screened
from nalora.studies.store import ANSWERS, TEST, VALIDATION, Result

_Pair = tuple[str, str]  # an arm, and the arm it is compared with
_BySeed = Mapping[str, Mapping[int, float]]  # the values of a measure by arm and seed


class _Finished(NamedTuple):
    """A run whose test loss is known."""

    arm: str
    job: Job
    result: Result

    @property
    def seed(self) -> int:
        return int(self.job.settings["seed"])


def answer(schedule: Schedule, results: Results, failed: Mapping[str, str]) -> StudyAnswer:
    """Return the answer of a study, as far as its runs have ended; `failed` are errors by the key of the run."""
    combinations: dict[tuple[tuple[str, Any], ...], list[Cell]] = {}
    for cell in schedule.cells:
        combinations.setdefault(cell.settings, []).append(cell)
    parts = [_part(schedule, dict(settings), cells, results, failed) for settings, cells in combinations.items()]
    return StudyAnswer(schedule.study.name, schedule.study.baseline, parts)


def _part(
    schedule: Schedule, settings: dict[str, Any], cells: list[Cell], results: Results, failed: Mapping[str, str]
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
    complete = [run.arm for run in finished if run.result.has_all(run.job.parts)]
    missing = tuple(
        arm for arm, cell in arms.items() if complete.count(arm) < len(cell.arm.seeds) and arm not in diverged
    )
    lost = {
        arm: tuple(LostRun(job.key, job.label, failed[job.key]) for job in jobs)
        for arm, cell in arms.items()
        if (jobs := schedule.lost(cell, results, failed))
    }
    dropped = {arm: few for arm, cell in arms.items() if (few := schedule.dropped_rates(cell, results))}
    at_the_end = [arm for arm, cell in arms.items() if _is_at_the_end(rates[arm], cell.arm.learning_rates)]
    records = _records(finished)
    names = list(dict.fromkeys(name for record in records for name in record.measures))
    values = {name: _by_seed(records, name) for name in names}
    baseline = schedule.study.baseline
    others = [(arm, baseline) for arm in arms if arm != baseline]
    pairs = [(arm, control) for arm, controls in schedule.study.controls.items() for control in controls]
    not_compared = [
        *(text for family in (others, pairs) for name in names for text in _diverged_pairs(values[name], family, name)),
        *_pairs_without_results([*others, *pairs], lost, diverged),
    ]
    seeds = {arm: {*cell.arm.seeds} for arm, cell in arms.items()}
    # Some of an arm's seeds would give another verdict than all of them, by chance or because of the failure.
    values = {name: {arm: of[arm] for arm in of if arm not in missing} for name, of in values.items()}
    families = _families(others, schedule.study.claims)
    comparisons = {
        name: [one for family in families for one in _compared(of, family, seeds, name)]
        for name, of in values.items()
        if baseline in of and not _diverged_seeds(of[baseline])
    }
    controls = {name: family for name, of in values.items() if (family := _compared(of, pairs, seeds, name))}
    listed = (
        ("Lowest or highest of the learning rates tried; a rate beyond it may be better", at_the_end),
        (
            "Learning rates dropped after the first screening seed, whose validation loss is shown",
            [f"{arm} at {', '.join(f'{rate:g}' for rate in rates)}" for arm, rates in dropped.items()],
        ),
        ("Diverged with every learning rate", diverged),
        ("Not complete", missing),
    )
    claims = [one.sentence(name) for of in (comparisons, controls) for name, family in of.items() for one in family]
    return AnswerPart(
        settings,
        tabulate(records, _columns(names, records), unranked=missing),
        sentences=[*claims, *dict.fromkeys(not_compared)],
        notes=[
            *(f"{title}: {'; '.join(items)}." for title, items in listed if items),
            *_notes_on_lost_runs(lost),
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
    """Return the numbers of each run by column; the column names the questions if they differ.

    A diverged run has an infinite test loss, also if the task has no loss, so that it is not overlooked, and NaN for
    all other measures: a mean over the other seeds would flatter the arm.
    """
    seeds = {run.job.key: run.seed for run in finished}
    of_loss, of_answers = (
        questions.column_suffixes(
            {
                run.job.key: run.result.questions.get(part, "")
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
    """Return a column for each measure; measures up to 1 other than losses are shown in percent, unlike ratings."""
    columns = []
    for name in names:
        values = [record.measures.get(name, 0.0) for record in records]
        percent = not is_loss(name) and all(abs(value) <= 1 for value in values if math.isfinite(value))
        title, scale = (f"{name} %", 100.0) if percent else (name, 1.0)
        columns.append(Column(name, title, lower=is_loss(name), scale=scale))
    return columns


def _by_seed(records: Sequence[Record], measure: str) -> _BySeed:
    """Return the values of a measure, including those that are not finite."""
    values: dict[str, dict[int, float]] = {}
    for label, seed, measures in records:
        if measure in measures:
            values.setdefault(label, {})[seed] = measures[measure]
    return values


def _families(pairs: Sequence[_Pair], claims: Collection[str]) -> list[list[_Pair]]:
    """Return the comparisons that are corrected together: those of a study's claims, and the others."""
    families = ([pair for pair in pairs if (pair[0] in claims) is claimed] for claimed in (True, False))
    return [family for family in families if family]


def _compared(values: _BySeed, pairs: Sequence[_Pair], seeds: Mapping[str, set[int]], measure: str) -> list[Comparison]:
    """Compare the pairs whose values are known and finite: a mean over the seeds that did not diverge would flatter."""
    finite = {arm: by_seed for arm, by_seed in values.items() if not _diverged_seeds(by_seed)}
    known = [pair for pair in pairs if finite.keys() >= {*pair}]
    planned = sum(len(seeds[arm] & seeds[baseline]) >= FEWEST_SEEDS for arm, baseline in pairs)
    return compare_methods(finite, known, higher_is_better=not is_loss(measure), planned=planned)


def _diverged_seeds(by_seed: Mapping[int, float]) -> int:
    return sum(not math.isfinite(value) for value in by_seed.values())


def _diverged_pairs(values: _BySeed, pairs: Sequence[_Pair], measure: str) -> list[str]:
    """Return a sentence for every pair that is not compared because an arm diverged with some seeds."""
    sentences = []
    for arm, baseline in (pair for pair in pairs if values.keys() >= {*pair}):
        bad = [name for name in (arm, baseline) if _diverged_seeds(values[name])]
        reasons = " and ".join(
            f"{name} diverged with {_diverged_seeds(values[name])} of {counted(len(values[name]), 'seed')}"
            for name in bad
        )
        if bad:
            sentences.append(f"{reasons}: {'' if arm in bad else f'{arm} '}not compared with {baseline} by {measure}.")
    return sentences


def _pairs_without_results(
    pairs: Sequence[_Pair], lost: Mapping[str, Sequence[LostRun]], diverged: Collection[str]
) -> list[str]:
    """Return a sentence for every pair that is not compared because runs of an arm failed or all its rates diverged."""
    reasons = {arm: f"{arm} diverged with every learning rate" for arm in diverged}
    reasons |= {arm: f"{arm} lacks {counted(len(runs), 'run')} that failed" for arm, runs in lost.items()}
    return [
        f"{' and '.join(reasons[name] for name in (arm, baseline) if name in reasons)}:"
        f" {arm} not compared with {baseline}."
        for arm, baseline in pairs
        if arm in reasons or baseline in reasons
    ]


def _notes_on_lost_runs(lost: Mapping[str, Sequence[LostRun]]) -> list[str]:
    """Name the missing runs, the arms that lack them, and how to try them again."""
    if not lost:
        return []
    runs = {run.key: f"{run.label} ({run.error})" for runs in lost.values() for run in runs}
    return [
        f"Missing: {'; '.join(runs.values())}.",
        f"Without them {', '.join(lost)} {'has' if len(lost) == 1 else 'have'} no verdict, and no learning rate if a "
        "screening run is missing; start the study with --retry-failed to try them again.",
    ]


def _notes_on_questions(
    schedule: Schedule, cells: list[Cell], results: Results, finished: Sequence[_Finished]
) -> list[str]:
    tested = [(run.seed, run.result.questions.get(TEST, "")) for run in finished if not run.result.diverged]
    screened = [
        (job.settings["seed"], results[job.key].questions.get(VALIDATION, ""))
        for cell in cells
        for job in schedule.screening(cell)
        if job.key in results and not results[job.key].diverged
    ]
    return questions.notes(tested, screened)


def _screening(schedule: Schedule, cell: Cell, results: Results, failed: Mapping[str, str]) -> dict[float, Any]:
    """Return the validation losses of an arm's rates; "missing" if a run failed, which is not a divergence."""
    lost = {key for key in failed if not is_screened(key, results)}
    return {
        rate: loss if lost.isdisjoint(schedule.screening_keys(cell, rate, results)) else "missing"
        for rate, loss in schedule.screened(cell, results).items()
    }


def _shown(schedule: Schedule, cell: Cell, results: Results) -> str | None:
    """Return the key of the run that represents an arm: the first seed at the chosen rate, or the best one known."""
    rate = schedule.chosen_rate(cell, results)
    for job in schedule.final(cell, rate) if rate is not None else ():
        if job.key in results:
            return job.key
    keys = [job.key for job in schedule.screening(cell, results) if job.key in results]
    return min(keys, key=lambda key: results[key].losses.get(VALIDATION, math.inf), default=None)


def _is_at_the_end(rate: float | None, tried: tuple[float, ...]) -> bool:
    """Whether the rate is the lowest or highest of several."""
    return rate is not None and len(tried) > 1 and rate in (min(tried), max(tried))


def _files(name: str, folder: Path) -> tuple[Path, Path]:
    """Return the paths of the page and of its numbers."""
    return folder / f"{name}.md", folder / f"{name}.json"


def refuse_foreign_files(name: str, folder: Path) -> None:
    """Raise `NALoRAError` if the files of a study's answer exist and were not written by nalora."""
    heading = f"# {name}\n".encode()
    checks: tuple[Callable[[bytes], bool], ...] = (
        lambda head: outputs.is_text(head) or head.startswith(heading),  # 0.1 wrote the page without a comment
        lambda head: b'"learning_rates"' in head,
    )
    for file, check in zip(_files(name, folder), checks, strict=True):
        outputs.refuse_foreign_files([file], check, option="--store", kind="an answer")


def write(results: StudyAnswer, folder: Path) -> Path:
    """Write the answer as a page and as numbers into the folder; return the page's path."""
    refuse_foreign_files(results.name, folder)
    page, numbers = _files(results.name, folder)
    atomic.write(page, results.markdown())
    content = [part.numbers() for part in results.parts]
    atomic.write(numbers, atomic.json_text(content, indent=2, default=str) + "\n")
    return page
