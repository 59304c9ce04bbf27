"""A file is there whole or not at all, and nothing is left beside it."""

from __future__ import annotations

import os

import pytest
import torch
from safetensors import safe_open

from nalora import whole_files


@pytest.mark.parametrize("content", ["φ(z)·u\nzwei\n", b"\x00\xff\r\n"])
def test_what_is_written_is_there_and_nothing_else(tmp_path, content):
    path = tmp_path / "file"
    for _ in range(2):  # the second one takes the place of the first
        whole_files.write(path, content)
    assert path.read_bytes() == (content.encode() if isinstance(content, str) else content)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_write_that_fails_leaves_the_file_before(tmp_path, monkeypatch, step):
    path = tmp_path / "file"
    whole_files.write(path, "before")
    seen = []

    def full(*_):
        seen.extend(each.name for each in tmp_path.iterdir())
        raise OSError("disk full")

    monkeypatch.setattr(os, step, full)
    with pytest.raises(OSError, match="disk full"):
        whole_files.write(path, "after")
    assert sorted(seen) == [f".file.{os.getpid()}", "file"]
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_tensors_come_back_with_their_metadata(tmp_path):
    given = {"a": torch.arange(6.0).reshape(2, 3).T, "b": torch.tensor([True, False])}
    whole_files.save_tensors(tmp_path / "t.safetensors", given, {"version": "1"})
    whole_files.save_tensors(tmp_path / "plain.safetensors", given)
    with safe_open(tmp_path / "t.safetensors", framework="pt") as file:
        assert file.metadata() == {"version": "1"}
        assert {name: file.get_tensor(name).tolist() for name in file.keys()} == {  # noqa: SIM118
            name: each.tolist() for name, each in given.items()
        }
    with safe_open(tmp_path / "plain.safetensors", framework="pt") as file:
        assert not file.metadata()
