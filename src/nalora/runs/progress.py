"""Progress bars: what is done, how much of it, and of how much."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TaskID, TextColumn
from rich.progress import TimeElapsedColumn as Elapsed
from rich.progress import TimeRemainingColumn as Remaining

Report = Callable[[str, int, int], None]


def progress_bars(console: Console, *columns: ProgressColumn, transient: bool = False) -> Progress:
    """Return bars with counts and times; `columns` are shown between them."""
    counts = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*counts, *columns, Elapsed(), Remaining(), console=console, transient=transient)


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
