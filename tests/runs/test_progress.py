"""Work that reports what it does has one bar for each of it."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from nalora.runs.progress import LiveText, bars, progress_bars


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


@pytest.mark.parametrize(("done", "left"), [(1, "-:--:-- left"), (4, "0:00:00 left")])
@pytest.mark.parametrize("text", ["loss 0.651", "loss 0.651 · sup/res/pos 0.12/0.80/0.08 · scales 0.95/0.90/0.90"])
def test_both_times_are_labelled_and_a_long_text_is_cut_at_80_columns(done, left, text):
    console = Console(file=io.StringIO(), width=80)
    progress = progress_bars(console, LiveText("{task.fields[live]}"))
    progress.update(progress.add_task("training", total=4, live=text), completed=done)
    console.print(progress.get_renderable())
    (line,) = console.file.getvalue().splitlines()
    assert line.startswith("training ")
    assert f" {done}/4 loss 0.651" in line
    assert line.endswith(f" 0:00:00 elapsed {left}")


def test_short_work_has_no_bar(monkeypatch):
    clock = iter([0.0, 0.5, 1.5])
    monkeypatch.setattr("nalora.runs.progress.time", type("Clock", (), {"monotonic": lambda: next(clock)}))
    console = Console(file=io.StringIO(), width=120)
    with bars(console, after=1) as report:
        report("reading", 1, 4)
        assert console.file.getvalue() == ""
        report("reading", 2, 4)
    assert "2/4" in console.file.getvalue()
