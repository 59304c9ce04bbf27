"""A study's report: its answer first, then one run of each arm in detail."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from nalora.errors import NALoRAError
from nalora.evaluation.significance import Comparison
from nalora.report.data import RunData, read_run
from nalora.report.html import write_report
from nalora.report.study_answer import AnswerPart, Difference, StudyAnswer
from nalora.studies.answer import Part, answer
from nalora.studies.conduct import Progress, so_far
from nalora.studies.schedule import Cell
from nalora.studies.store import VALIDATION
from nalora.studies.study import Study, question, read


def write_page_of(file: Path, store: Path, output: Path | None = None, *, trust: bool = False) -> Path:
    """Write the report of a study's file from the runs in a store, into the store by default; its path.

    Args:
        file: the study's.
        store: the folder of its runs.
        output: the HTML file.
        trust: whether Python files that the study names as methods may run.

    Raises:
        NALoRAError: no study, no run of it has ended, or it would run code without trust.
    """
    study = read(file, trust=trust)
    return write_page(study, so_far(study, store), store, output or store / f"{study.name}.html", question(file))


def write_page(study: Study, progress: Progress, store: Path, output: Path, asked: str = "") -> Path:
    """Write the report of what is known of a study; its path.

    Raises:
        NALoRAError: no run of the study has ended.
    """
    shown = [(cell, key) for cell in progress.schedule.cells if (key := _shown(progress, cell)) is not None]
    if not shown:
        raise NALoRAError(
            str(store), found=f"no finished run of {study.name}", expected="one or more", fix="run the study first"
        )
    runs = [_named(read_run(store / key), cell) for cell, key in shown]
    places = {(cell.settings, cell.arm.name): place for place, (cell, _) in enumerate(shown)}
    parts = [_part(each, places) for each in answer(progress.schedule, progress.results, progress.failed)]
    return write_report(runs, output, StudyAnswer(study.name, asked, study.baseline, parts))


def _shown(progress: Progress, cell: Cell) -> str | None:
    """The run that stands for an arm: its first seed at the chosen rate, or the best that is known."""
    schedule, results = progress.schedule, progress.results
    rate = schedule.chosen_rate(cell, results)
    if rate is not None:
        for job in schedule.final(cell, rate):
            if job.key in results:
                return job.key
    jobs = [job for job in schedule.screening(cell, results) if job.key in results]
    best = min(jobs, key=lambda job: results[job.key].losses.get(VALIDATION, math.inf), default=None)
    return best.key if best else None


def _named(run: RunData, cell: Cell) -> RunData:
    rate, seed = run.settings.get("learning_rate"), run.settings.get("seed")
    told = f"lr {rate:g}" if isinstance(rate, float) else ""
    return replace(run, name=f"{cell.name} ({told}, seed {seed})")


def _part(part: Part, places: Mapping[tuple[Any, str], int]) -> AnswerPart:
    here = tuple(part.settings.items())
    return AnswerPart(
        heading=part.heading,
        table=part.table,
        sentences=part.sentences(),
        notes=part.notes(),
        screening=part.screening,
        rates=part.rates,
        differences=_differences(part.comparisons),
        controls=_differences(part.controls),
        missing=list({run.key: run.label for runs in part.lost.values() for run in runs}.values()),
        shown={arm: places[here, arm] for arm in part.rates if (here, arm) in places},
    )


def _differences(comparisons: Mapping[str, Sequence[Comparison]]) -> dict[str, list[Difference]]:
    return {
        measure: [
            Difference(each.method, each.baseline, each.difference, each.interval, each.seeds, each.verdict)
            for each in found
        ]
        for measure, found in comparisons.items()
    }
