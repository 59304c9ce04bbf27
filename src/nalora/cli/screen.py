"""What the commands share: the console, tables, and options that several commands have."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from typing import Annotated, Any, Literal

import typer
from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text

# The exit code of a command that Ctrl-C stopped, as in shells.
INTERRUPTED = 130
# Characters that are not printable and yet change nothing but the text: the last two join emojis and letters.
_HARMLESS = "\n\t\N{ZERO WIDTH JOINER}\N{ZERO WIDTH NON-JOINER}"

DataDir = Annotated[str | None, typer.Option(help="Folder with the task's files, used instead of the hub.")]
Device = Annotated[
    str | None, typer.Option(help="Device, such as cpu or cuda:1 (default: that of the run, or the best available).")
]
TakeOver = Annotated[
    bool, typer.Option("--take-over", help="Take over the folder of a process on another host that has ended.")
]
Trust = Annotated[
    bool,
    typer.Option("--trust", help="Run Python code that comes with a run or a model; only if you trust its authors."),
]

Target = Annotated[
    str,
    typer.Argument(metavar="RUN|ADAPTER|MODEL", help="The folder of a run, the folder of a PEFT adapter, or a model."),
]
BaseModel = Annotated[
    str | None,
    typer.Option("--model", metavar="BASE", help="Base model of the adapter (default: the one that it names)."),
]
Style = Annotated[
    Literal["plain", "chat"] | None,
    typer.Option(help="Plain prompts, or the chat template (default: as in training, else the template if any)."),
]
Temperature = Annotated[float, typer.Option(min=0, help="Temperature of sampling; 0 is greedy: the likeliest token.")]
TopP = Annotated[float, typer.Option(min=0.01, max=1, help="Sample from the likeliest tokens of this probability.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of sampling.")]
MaxTokens = Annotated[int, typer.Option(min=1, help="Maximum number of tokens of an answer.")]


def printable(text: str) -> str:
    """Return text of a model or a file without control characters of terminals; line breaks and emojis are kept."""
    return "".join(char if char.isprintable() or char in _HARMLESS else "\N{REPLACEMENT CHARACTER}" for char in text)


def hush_libraries() -> None:
    """Suppress warnings, log messages and progress bars of libraries; errors are still reported."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)

    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()


def console() -> Console:
    """Return a console on stdout; in a pipe it has COLUMNS columns, or 160 so that lines are not wrapped at 80."""
    return Console() if sys.stdout.isatty() or _columns_are_set() else Console(width=160)


def print_table(screen: Console, rows: Table) -> None:
    """Print a table of many columns: as wide as it is in a pipe, unless COLUMNS says otherwise."""
    if not screen.is_terminal and not _columns_are_set():
        needed = Measurement.get(screen, screen.options.update(width=sys.maxsize), rows).maximum
        screen.width = max(screen.width, needed)
    screen.print(rows)


def _columns_are_set() -> bool:
    columns = os.environ.get("COLUMNS", "")
    return columns.isdecimal() and int(columns) > 0


class Unpadded(Table):
    """A table without spaces at the end of its lines, unless it is printed on a terminal, where they do no harm."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the segments of the table, in a pipe line by line."""
        segments: Any = super().__rich_console__(console, options)
        if console.is_terminal:
            yield from segments
            return
        for line in Segment.split_lines(segments):
            while line and not line[-1].text.rstrip(" "):
                line.pop()
            yield from line[:-1]
            yield from (Segment(last.text.rstrip(" "), last.style) for last in line[-1:])
            yield Segment.line()


def table(*columns: str | Column, **options: Any) -> Table:
    """Return an empty table in the style of all commands; where it is too wide, cells are folded and not cut."""
    whole = [column if isinstance(column, Column) else Column(column, overflow="fold") for column in columns]
    return Unpadded(*whole, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False, **options)


def number(value: float | None, form: str) -> str:
    """Return the formatted number, or a dash if there is none."""
    return "–" if value is None else format(value, form)


def literal(text: str, style: str = "") -> Text:
    """Return text of a file or a model for the terminal: no markup, no control characters."""
    return Text(printable(text.expandtabs(4)), style)
