from __future__ import annotations

import importlib
from pathlib import Path

import pytest

RESULTS = Path(__file__).parents[2] / "results"


@pytest.fixture(autouse=True)
def _scripts_find_each_other(monkeypatch):
    monkeypatch.syspath_prepend(RESULTS)


@pytest.fixture(scope="session")
def store(tmp_path_factory):
    """A store with all kept runs, as `python results/restore.py STORE` writes it."""
    folder = tmp_path_factory.mktemp("results") / "store"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(RESULTS)
        importlib.import_module("restore").restore(RESULTS, folder)
    return folder
