"""The console of the commands: its width in a pipe, and tables that are too wide for it."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.table import Column

from nalora.cli.screen import Unpadded, console, print_table, table


@pytest.mark.parametrize(("columns", "width"), [(None, 160), ("50", 50), ("0", 160), ("wide", 160), ("", 160)])
def test_a_pipe_has_the_columns_of_the_environment(monkeypatch, capsys, columns, width):
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    console().print("word " * 60)
    lines = capsys.readouterr().out.splitlines()
    assert width - 5 <= max(len(line.rstrip()) for line in lines) <= width


@pytest.mark.parametrize("columns", [None, "100"])
def test_no_cell_of_a_table_is_cut_in_a_pipe(monkeypatch, capsys, columns):
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    rows = table(Column("block", no_wrap=True), *(f"measure_{i}" for i in range(20)))
    values = [f"0.{10**11 + i}" for i in range(20)]
    rows.add_row("model.layers.10.mlp", *values)
    print_table(console(), rows)
    out = capsys.readouterr().out
    assert "…" not in out
    if columns is None:
        assert out.splitlines()[-2].split() == ["model.layers.10.mlp", *values]
    else:
        assert max(map(len, out.splitlines())) <= 100
        assert sum(character.isdecimal() for character in out) >= sum(len(value) - 1 for value in values)


@pytest.mark.parametrize("make", [lambda: table("name", "value", title="numbers"), lambda: Unpadded.grid()])
def test_no_line_of_a_table_ends_with_spaces_in_a_pipe(make):
    def printed(**options):
        rows, screen = make(), Console(file=io.StringIO(), width=60, color_system=None, **options)
        rows.add_row("a long first cell", "1")
        rows.add_row("short", "  two  words")
        rows.add_row("empty", "")
        screen.print(rows)
        return screen.file.getvalue()

    on_a_terminal, in_a_pipe = printed(force_terminal=True), printed()
    assert any(line.endswith(" ") for line in on_a_terminal.splitlines())
    assert in_a_pipe.splitlines() == [line.rstrip() for line in on_a_terminal.splitlines()]


def test_the_tables_of_a_command_have_no_trailing_spaces(run):
    for command in ("methods", "tasks", "models", "recipes", "activations"):
        _, out, _ = run(command)
        assert [line for line in out.splitlines() if line != line.rstrip()] == [], command
