"""What the commands share: the console, tables, and options that several commands have."""

from __future__ import annotations

import logging
import sys
import warnings
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

# The exit code of a command that Ctrl-C stopped, as in shells.
INTERRUPTED = 130

DataDir = Annotated[str | None, typer.Option(help="Folder with the task's files, used instead of the hub.")]
Device = Annotated[
    str | None, typer.Option(help="Device, such as cpu or cuda:1 (default: that of the run, or the best available).")
]
TakeOver = Annotated[
    bool, typer.Option("--take-over", help="Take over the folder of a process on another host that has ended.")
]
Trust = Annotated[
    bool, typer.Option("--trust", help="Run Python code that the settings name; only for settings that you trust.")
]


def hush_libraries() -> None:
    """Suppress warnings, log messages and progress bars of libraries; errors are still reported."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)

    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()


def console() -> Console:
    """Return a console on stdout; in a pipe it is 160 columns wide, so that lines are not wrapped at 80."""
    return Console() if sys.stdout.isatty() else Console(width=160)


def table(*columns: str, **options: Any) -> Table:
    """Return an empty table in the style of all commands."""
    return Table(*columns, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False, **options)


def number(value: float | None, form: str) -> str:
    """Return the formatted number, or a dash if there is none."""
    return "–" if value is None else format(value, form)
