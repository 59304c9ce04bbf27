"""A file's digest is computed once as long as the file does not change."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nalora.models import file_digest
from nalora.models.file_digest import digest_of_file


def test_a_file_is_read_once_for_as_long_as_it_stays(tmp_path, monkeypatch):
    file = tmp_path / "weights"
    file.write_bytes(b"one")
    monkeypatch.setattr(file_digest, "_TICK", -1)
    first = digest_of_file(file)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", lambda *_: pytest.fail("read again"))
        assert digest_of_file(file) == first
    file.write_bytes(b"three")
    assert digest_of_file(file) != first


def test_a_file_that_changes_within_a_tick_of_the_clock_is_read_again(tmp_path, monkeypatch):
    file = tmp_path / "weights"
    file.write_bytes(b"one")
    same = file.stat()
    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", lambda *_, **__: same)
        first = digest_of_file(file)
        file.write_bytes(b"two")
        second = digest_of_file(file)
    assert second != first
