"""`nalora report`: what came of runs, as a page to look at."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nalora.cli.screen import console, hush_libraries
from nalora.errors import NALoRAError
from nalora.runs import packaged

if TYPE_CHECKING:
    from nalora.report.data import RunData


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...|STUDY.yaml|NAME", help="Runs' folders, a folder of runs, or a study."),
    ],
    output: Annotated[
        Path | None,
        typer.Option(help="The HTML file.", show_default="report.html in the folder given, or above several"),
    ] = None,
    figures: Annotated[
        Path | None, typer.Option(metavar="DIR", help="In place of the page: all figures, as PNG and SVG.")
    ] = None,
    paper_figures: Annotated[
        Path | None, typer.Option(metavar="DIR", help="In place of the page: the paper's two diagnostic figures.")
    ] = None,
    tables: Annotated[
        Path | None, typer.Option(metavar="DIR", help="In place of the page: tables.md and tables.tex.")
    ] = None,
    store: Annotated[Path, typer.Option(help="Of a study: the folder of its runs.")] = Path("runs/store"),
    trust: Annotated[
        bool, typer.Option("--trust", help="Run code that the study's settings name: for studies of people you trust.")
    ] = False,
    open_it: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
) -> None:
    """Write one HTML file that shows what came of RUNs side by side, or of a study; it needs no network."""
    hush_libraries()
    screen = console()
    if len(runs) == 1 and _is_study(runs[0]):
        if figures or paper_figures or tables:
            raise NALoRAError(
                str(runs[0]),
                found="a study with --figures, --paper-figures or --tables",
                expected="runs' folders, which these are of",
                fix=f"leave them out, or give {store}/KEY for the runs that you want",
            )
        from nalora.studies.page import write_page_of

        path = write_page_of(runs[0], store, output, trust=trust)
    else:
        from nalora.report.data import read_runs
        from nalora.report.html import write_report

        found = read_runs(runs)
        if figures or paper_figures or tables:
            _write_parts(found, figures, paper_figures, tables)
            if output is None and not open_it:
                return
        path = write_report(found, output or default_output(runs))
        for run in found:
            for notice in run.notices:
                screen.print(f"{run.name}: {notice}", highlight=False, markup=False)
    screen.print(f"the report: {path}", highlight=False, markup=False)
    if open_it:
        typer.launch(path.resolve().as_uri())


def _is_study(path: Path) -> bool:
    """A file, or the name of one that comes with nalora where no folder has that name."""
    return path.suffix in (".yaml", ".yml") or (str(path) in packaged.studies() and not path.exists())


def _write_parts(
    found: Sequence[RunData], figures: Path | None, paper_figures: Path | None, tables: Path | None
) -> None:
    """Write what was asked for, one path a line; what could not be drawn is said on stderr, and is an error if all."""
    from nalora.report.figures import write_figures, write_paper_figures
    from nalora.report.run_tables import refuse_foreign_tables, write_tables

    files: list[Path] = []
    if tables is not None:
        refuse_foreign_tables(tables)
    for write, folder in ((write_figures, figures), (write_paper_figures, paper_figures)):
        if folder is not None:
            written = write(found, folder)
            files += written.files
            for sentence in written.skipped:
                print(sentence, file=sys.stderr)
    if tables is not None:
        files += write_tables(found, tables)
    for file in files:
        print(file)
    if not files:
        raise typer.Exit(1)


def default_output(runs: list[Path]) -> Path:
    """Into the folder given; of several, into the one that they share."""
    folders = [run.resolve() for run in runs]
    if len(folders) == 1:
        return runs[0] / "report.html"
    shared = folders[0].parent
    return runs[0].parent / "report.html" if all(each.parent == shared for each in folders) else Path("report.html")
