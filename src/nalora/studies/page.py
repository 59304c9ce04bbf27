"""A study's report: its answer first, then one run of each arm in detail."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from nalora.errors import NALoRAError
from nalora.report.data import RunData, read_run
from nalora.report.html import write_report
from nalora.report.run_tables import write_into
from nalora.studies.answer import answer
from nalora.studies.combined import Answered, combined_tables
from nalora.studies.conduct import Progress, so_far
from nalora.studies.study import Study, question, read


def write_page_of(file: Path, store: Path, output: Path | None = None, *, trust: bool = False) -> Path:
    """Write the report of a study's file from the runs in a store, by default into the store; return its path.

    Without `trust`, a study that names Python files, whose code would run, is refused.
    """
    study = read(file, trust=trust)
    return write_page(study, so_far(study, store), store, output or store / f"{study.name}.html", question(file))


def write_tables_of(files: Sequence[Path], store: Path, folder: Path, *, trust: bool = False) -> list[Path]:
    """Write the combined tables of studies from the runs in a store as tables.md and tables.tex; return their paths.

    Raises:
        NALoRAError: no run of the studies has ended, or the folder has tables that nalora did not write.
    """
    answered = []
    for file in files:
        study = read(file, trust=trust)
        progress = so_far(study, store)
        answered.append(Answered(study, answer(progress.schedule, progress.results, progress.failed)))
    tables = combined_tables(answered)
    if not tables:
        names = ", ".join(study.name for study, _ in answered)
        raise NALoRAError(
            str(store), found=f"no compared run of {names}", expected="one or more", fix="run the study first"
        )
    return write_into(tables, folder)


def write_page(study: Study, progress: Progress, store: Path, output: Path, question: str = "") -> Path:
    """Write the report of a study's progress; return its path.

    Raises:
        NALoRAError: no run of the study has ended.
    """
    results = replace(answer(progress.schedule, progress.results, progress.failed), question=question)
    runs = [
        _named(read_run(store / key), ", ".join(filter(None, [arm, part.heading])))
        for part in results.parts
        for arm, key in part.shown.items()
    ]
    if not runs:
        raise NALoRAError(
            str(store), found=f"no finished run of {study.name}", expected="one or more", fix="run the study first"
        )
    return write_report(runs, output, results)


def _named(run: RunData, name: str) -> RunData:
    rate, seed = run.settings.get("learning_rate"), run.settings.get("seed")
    shown = f"lr {rate:g}" if isinstance(rate, float) else ""
    return replace(run, name=f"{name} ({shown}, seed {seed})")
