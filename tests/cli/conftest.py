from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable

import pytest

from nalora import cli


@pytest.fixture
def run(monkeypatch, capsys) -> Callable[..., tuple[int, str, str]]:
    """Run the command line in this process: exit code, stdout, stderr; there is never a traceback."""
    # The command line sets it for its process, which is that of all tests.
    monkeypatch.setenv("OMP_WAIT_POLICY", os.environ.get("OMP_WAIT_POLICY", "PASSIVE"))
    # It switches logging and warnings off for the whole process, and so for the tests that come later.
    for commands in vars(cli).values():
        if hasattr(commands, "hush_libraries"):
            monkeypatch.setattr(commands, "hush_libraries", lambda: None)

    def type_in(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["nalora", *map(str, arguments)])
        with pytest.raises(SystemExit) as leaving:
            cli.main()
        printed = capsys.readouterr()
        assert "Traceback" not in printed.out + printed.err
        return leaving.value.code or 0, printed.out, printed.err

    return type_in


@pytest.fixture
def report(run):
    return functools.partial(run, "report")
