"""`nalora report`: the results of runs or of a study as a page, figures or tables."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nalora.cli.screen import Trust, console, hush_libraries
from nalora.errors import NALoRAError
from nalora.runs import packaged

if TYPE_CHECKING:
    from nalora.report.data import RunData


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...|STUDY.yaml...|NAME...", help="Folders of runs, a folder of such folders, or a study."
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(help="The HTML file.", show_default="report.html in the run's folder, or in that of all runs"),
    ] = None,
    figures: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Instead of the page, write all figures as PNG and SVG.")
    ] = None,
    paper_figures: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Instead of the page, write the paper's two diagnostic figures.")
    ] = None,
    tables: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Instead of the page, write tables.md and tables.tex; several studies get one."
        ),
    ] = None,
    store: Annotated[Path, typer.Option(help="Folder of the runs of a study.")] = Path("runs/store"),
    trust: Trust = False,
    open_it: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
) -> None:
    """Write one HTML file with the results of runs, or of a study; it works without a network.

    nalora report runs/lora runs/na-lora --open
    """
    hush_libraries()
    screen = console()
    if all(map(_is_study, runs)):
        if figures or paper_figures:
            raise NALoRAError(
                str(runs[0]),
                found="a study with --figures or --paper-figures",
                expected="folders of runs for these options",
                fix=f"leave them out, or give {store}/KEY for the runs that you want",
            )
        if tables is not None:
            from nalora.studies.page import write_tables_of

            for file in write_tables_of(runs, store, tables, trust=trust):
                print(file)
            return
        if len(runs) > 1:
            raise NALoRAError(
                ", ".join(map(str, runs)),
                found=f"{len(runs)} studies",
                expected="one study for a page",
                fix="add --tables DIR for their combined tables, or give one study",
            )
        from nalora.studies.page import write_page_of

        path = write_page_of(runs[0], store, output, trust=trust)
    else:
        from nalora.report.data import read_runs
        from nalora.report.html import write_report

        contents = read_runs(runs)
        if figures or paper_figures or tables:
            _write_parts(contents, figures, paper_figures, tables)
            if output is None and not open_it:
                return
        path = write_report(contents, output or default_output(runs))
        for run in contents:
            for notice in run.notices:
                screen.print(f"{run.name}: {notice}", highlight=False, markup=False)
    screen.print(f"Report: {path}", highlight=False, markup=False)
    if open_it:
        typer.launch(path.resolve().as_uri())


def _is_study(path: Path) -> bool:
    """Whether it is a study's file, or the name of a packaged study and of no file or folder here."""
    return path.suffix in (".yaml", ".yml") or (str(path) in packaged.studies() and not path.exists())


def _write_parts(
    runs: Sequence[RunData], figures: Path | None, paper_figures: Path | None, tables: Path | None
) -> None:
    """Write figures and tables and print their paths; what cannot be drawn is reported on stderr.

    Exits with 1 if nothing was written.
    """
    from nalora.report.figures import write_figures, write_paper_figures
    from nalora.report.run_tables import refuse_foreign_tables, write_tables

    files: list[Path] = []
    if tables is not None:
        refuse_foreign_tables(tables)
    for write, folder in ((write_figures, figures), (write_paper_figures, paper_figures)):
        if folder is not None:
            written = write(runs, folder)
            files += written.files
            for sentence in written.skipped:
                print(sentence, file=sys.stderr)
    if tables is not None:
        files += write_tables(runs, tables)
    for file in files:
        print(file)
    if not files:
        raise typer.Exit(1)


def default_output(runs: list[Path]) -> Path:
    """Return report.html in the run's folder; of several runs in their common parent folder, or else here."""
    if len(runs) == 1:
        return runs[0] / "report.html"
    same_parent = len({run.resolve().parent for run in runs}) == 1
    return (runs[0].parent if same_parent else Path()) / "report.html"
