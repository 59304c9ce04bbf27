"""Progress bars: what is done, how much of it, and of how much."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

Report = Callable[[str, int, int], None]
# Of 80 columns, the labelled times take 28, a count such as 230/4500 takes 8 and a loss 10.
_BAR_WIDTH = 12


class _Elapsed(TimeElapsedColumn):
    """The time since the start."""

    def render(self, task: Task) -> Text:
        """Return the time with its label."""
        return super().render(task).append(" elapsed")


class _Left(TimeRemainingColumn):
    """The estimated time until the end."""

    def render(self, task: Task) -> Text:
        """Return the time with its label."""
        return super().render(task).append(" left")


class LiveText(TextColumn):
    """A text that changes. Where the terminal is too narrow it is cut, not the count and the times next to it."""

    def __init__(self, text: str) -> None:
        super().__init__(text, table_column=Column())

    def render(self, task: Task) -> Text:
        """Return the text, on one line."""
        text = super().render(task)
        text.no_wrap, text.overflow = True, "ellipsis"
        return text


def progress_bars(console: Console, *columns: ProgressColumn, transient: bool = False) -> Progress:
    """Return bars with counts and times; `columns` are shown between them."""
    counts = (
        TextColumn("{task.description}"),
        BarColumn(_BAR_WIDTH),
        MofNCompleteColumn(table_column=Column(no_wrap=True)),
    )
    times = (_Elapsed(Column(no_wrap=True)), _Left(table_column=Column(no_wrap=True)))
    return Progress(*counts, *columns, *times, console=console, transient=transient)


@contextlib.contextmanager
def bars(console: Console, *, transient: bool = False, after: float = 0.0) -> Iterator[Report]:
    """Show one bar for each name that is reported as (name, done, total), if the work takes longer than `after` s.

    Transient bars are removed at the end.
    """
    progress, began = progress_bars(console, transient=transient), time.monotonic()
    tasks: dict[str, TaskID] = {}

    def report(name: str, done: int, total: int) -> None:
        if name not in tasks:
            tasks[name] = progress.add_task(name, total=total)
        progress.update(tasks[name], completed=done, total=total)
        if time.monotonic() - began >= after:
            progress.start()

    if not after:
        progress.start()
    try:
        yield report
    finally:
        progress.stop()
