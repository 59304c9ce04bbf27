"""What the pages of single studies share: options, the state of the study, losses by arm and seed, writing a page."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from nalora.errors import counted
from nalora.files import atomic, outputs
from nalora.studies.conduct import Progress
from nalora.studies.schedule import Cell
from nalora.studies.store import TEST
from tables.stored_answers import STUDIES

RESULTS = Path(__file__).parents[1]


def options(description: str, name: str) -> argparse.ArgumentParser:
    """Return a parser with the study's file, the store, and the folder of what is written."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--study", type=Path, default=STUDIES / f"{name}.yaml", help=f"default: studies/{name}.yaml")
    parser.add_argument("--store", type=Path, default=RESULTS / "store", help="default: results/store")
    parser.add_argument("--output", type=Path, default=RESULTS / name, help=f"default: results/{name}")
    return parser


def unfinished(progress: Progress) -> str:
    """Return a sentence with the number of runs that are missing; empty if the study is finished."""
    schedule, results = progress.schedule, progress.results
    waiting = {job.key for job in schedule.open_jobs(results, {})}
    if not waiting:
        return ""
    complete = sum(not {job.key for job in schedule.needed(cell, results)} & waiting for cell in schedule.cells)
    arms = f"{complete} of {counted(len(schedule.cells), 'arm')} {'is' if complete == 1 else 'are'} complete"
    failed = f"; {counted(len(progress.failed), 'run')} failed" if progress.failed else ""
    done = len(results.keys() - waiting)
    return f"Not finished: {schedule.study.name} has {done:,} of {schedule.total(results):,} runs, {arms}{failed}."


def test_losses(progress: Progress, cell: Cell) -> dict[int, float]:
    """Return the test loss of every finished seed at the arm's chosen learning rate."""
    rate = progress.schedule.chosen_rate(cell, progress.results)
    jobs = progress.schedule.final(cell, rate) if rate is not None else []
    return {
        int(job.settings["seed"]): progress.results[job.key].losses[TEST]
        for job in jobs
        if job.key in progress.results and TEST in progress.results[job.key].losses
    }


def percent(share: float) -> str:
    """Return a share as the pages write it."""
    return f"{share:.0%}".replace("%", " %")


def write_page(path: Path, lines: Sequence[str]) -> Path:
    """Write a page with nalora's mark; a file that nalora did not write is refused."""
    mark = f"<!-- {outputs.TEXT} -->"
    outputs.refuse_foreign_files(
        [path], lambda head: outputs.TEXT.encode() in head, option="--output", kind="a page of a study"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic.write(path, "\n".join([mark, *lines]) + "\n")
    return path
