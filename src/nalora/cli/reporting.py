"""`nalora report`: what came of runs, as a page to look at."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nalora.cli.screen import console


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Runs' folders, or a folder of runs.")],
    output: Annotated[
        Path | None, typer.Option(help="The HTML file.", show_default="report.html in the folder given")
    ] = None,
    open_it: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
) -> None:
    """Write one HTML file that shows what came of RUNs side by side; it needs no network and can be sent by mail."""
    from nalora.report.data import read_runs
    from nalora.report.html import write_report

    found = read_runs(runs)
    screen = console()
    path = write_report(found, output or default_output(runs))
    for run in found:
        for notice in run.notices:
            screen.print(f"{run.name}: {notice}", highlight=False, markup=False)
    screen.print(f"the report: {path}", highlight=False, markup=False)
    if open_it:
        typer.launch(path.resolve().as_uri())


def default_output(runs: list[Path]) -> Path:
    """Into the folder given; of several, into the one that they share."""
    folders = [run.resolve() for run in runs]
    if len(folders) == 1:
        return runs[0] / "report.html"
    shared = folders[0].parent
    return runs[0].parent / "report.html" if all(each.parent == shared for each in folders) else Path("report.html")
