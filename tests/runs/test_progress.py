"""Work that reports what it does has one bar for each of it."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from nalora.runs.progress import bars


@pytest.mark.parametrize("transient", [False, True])
def test_one_bar_for_each_thing_that_is_reported(transient):
    console = Console(file=io.StringIO(), width=120)
    with bars(console, transient=transient) as report:
        report("writing", 1, 4)
        report("scoring", 2, 2)
        report("writing", 3, 5)
    lines = [line.split() for line in console.file.getvalue().splitlines()]
    shown = {line[0]: line[2] for line in lines if line}
    assert shown == ({} if transient else {"writing": "3/5", "scoring": "2/2"})


def test_short_work_has_no_bar(monkeypatch):
    clock = iter([0.0, 0.5, 1.5])
    monkeypatch.setattr("nalora.runs.progress.time", type("Clock", (), {"monotonic": lambda: next(clock)}))
    console = Console(file=io.StringIO(), width=120)
    with bars(console, after=1) as report:
        report("reading", 1, 4)
        assert console.file.getvalue() == ""
        report("reading", 2, 4)
    assert "2/4" in console.file.getvalue()
