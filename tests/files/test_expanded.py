"""Paths with ~ are expanded where a user of that name exists, and kept as they are elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from nalora.files import expanded


def test_the_home_folder_is_expanded(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert expanded("~/models/a") == tmp_path / "models" / "a"


@pytest.mark.parametrize("name", ["~no-such-user/a", "~0", "~\ud800", "models/~a", "\ud800"])
def test_other_names_are_kept(name):
    assert expanded(name) == Path(name)
