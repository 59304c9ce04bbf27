"""Commands that `nalora suggest` prints do not write to folders that are used."""

from __future__ import annotations

from pathlib import Path

import pytest

from nalora.cli.suggested_commands import Commands


@pytest.fixture
def commands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return Commands(Path("my.yaml"), ["rank=4", "output=runs/a b"], "runs/a b", None, 30, None, 1)


def used(folder):
    Path(folder).mkdir(parents=True)
    (Path(folder) / "run.yaml").touch()


def test_the_folder_of_the_run_is_kept_while_it_is_free(commands):
    expected = "nalora train my.yaml rank=4 'output=runs/a b' learning_rate=0.001"
    assert commands.train(1e-3) == expected
    Path("runs/a b").mkdir(parents=True)
    assert commands.train(1e-3) == expected, "an empty folder is free"


def test_a_used_folder_is_replaced_by_one_that_names_the_rate(commands):
    used("runs/a b")
    assert commands.train(1e-3) == "nalora train my.yaml rank=4 learning_rate=0.001 'output=runs/a b-lr0.001'"
    used("runs/a b-lr0.001")
    Path("runs/a b-lr0.001-2").touch()
    assert commands.train(1e-3).endswith("'output=runs/a b-lr0.001-3'")


def test_another_run_has_a_folder_of_its_own(commands):
    assert commands.train(2e-3, another=True).endswith("'output=runs/a b-lr0.002'")
