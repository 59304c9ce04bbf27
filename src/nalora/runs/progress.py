"""Bars for work that says how far it is: what it does, how much of it is done, and of how much."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

Report = Callable[[str, int, int], None]


@contextlib.contextmanager
def bars(console: Console, *, transient: bool = False) -> Iterator[Report]:
    """One bar for each `what` that is reported as (what, done, total); transient ones are gone when the work is."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=transient) as progress:
        known: dict[str, TaskID] = {}

        def report(what: str, done: int, total: int) -> None:
            if what not in known:
                known[what] = progress.add_task(what, total=total)
            progress.update(known[what], completed=done, total=total)

        yield report
