"""A file is complete or missing, and no temporary file is left."""

from __future__ import annotations

import ast
import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

import nalora
from nalora.files import atomic


@pytest.mark.parametrize("content", ["φ(z)·u\nzwei\n", b"\x00\xff\r\n"])
def test_a_written_file_is_complete_and_the_only_file(tmp_path, content):
    path = tmp_path / "file"
    for _ in range(2):  # the second one takes the place of the first
        atomic.write(path, content)
    assert path.read_bytes() == (content.encode() if isinstance(content, str) else content)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failed_write_keeps_the_previous_file(tmp_path, monkeypatch, step):
    path = tmp_path / "file"
    atomic.write(path, "before")
    seen = []

    def full(*_):
        seen.extend(each.name for each in tmp_path.iterdir())
        raise OSError("disk full")

    monkeypatch.setattr(os, step, full)
    with pytest.raises(OSError, match="disk full"):
        atomic.write(path, "after")
    assert sorted(seen) == [f".file.{os.getpid()}", "file"]
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_tensors_are_read_back_with_their_metadata(tmp_path):
    given = {"a": torch.arange(6.0).reshape(2, 3).T, "b": torch.tensor([True, False])}
    atomic.save_tensors(tmp_path / "t.safetensors", given, {"version": "1"})
    atomic.save_tensors(tmp_path / "plain.safetensors", given)
    with safe_open(tmp_path / "t.safetensors", framework="pt") as file:
        assert file.metadata() == {"version": "1"}
        assert {name: file.get_tensor(name).tolist() for name in file.keys()} == {  # noqa: SIM118
            name: each.tolist() for name, each in given.items()
        }
    with safe_open(tmp_path / "plain.safetensors", framework="pt") as file:
        assert not file.metadata()


plain = st.none() | st.booleans() | st.integers() | st.text(st.characters(codec="utf-8")) | st.floats()


@given(st.recursive(plain, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20))
def test_json_is_valid_for_every_number(value):
    def no_bare_word(word):
        raise AssertionError(word)

    def expected(value):
        if isinstance(value, float):
            return value if math.isfinite(value) else None
        if isinstance(value, list):
            return [expected(each) for each in value]
        return {key: expected(each) for key, each in value.items()} if isinstance(value, dict) else value

    for settings in ({}, {"indent": 2}, {"compact": True}):
        text = atomic.json_text(value, **settings)
        text.encode()
        assert json.loads(text, parse_constant=no_bare_word) == expected(value)


def test_json_of_numpy_and_torch():
    value = {
        "scalars": (np.float32("nan"), np.float64("inf"), np.int64(3), np.bool_(True), torch.tensor(float("-inf"))),
        "arrays": [np.array([1.5, np.nan]), torch.tensor([[1, 2]])],
        np.int64(7): "a key",
    }
    assert json.loads(atomic.json_text(value)) == {
        "scalars": [None, None, 3, True, None], "arrays": [[1.5, None], [[1, 2]]], "7": "a key",
    }  # fmt: skip
    with pytest.raises(TypeError):
        atomic.json_text({"a": object()})
    assert atomic.json_text([Path("a"), math.nan], default=str) == '["a", null]'


def test_json_of_half_a_surrogate_pair_can_be_written():
    text = atomic.json_text({"answer": "φ \ud83d"})
    assert json.loads(text.encode()) == {"answer": "φ \ud83d"}
    assert "φ" in atomic.json_text("φ")


# Programs that run by themselves inside the sandbox, where they cannot import nalora, and send values, NaN included, to
# one another through pipes; and the messages between `nalora launch` and its program.
PIPES = ("tasks/sandboxed/", "integrations/startup/", "integrations/launched.py", "files/atomic.py")


def test_no_other_call_in_the_package_writes_json():
    """Hashing is not writing; every other text goes through `json_text`."""
    package = Path(nalora.__file__).parent
    found = []
    for file in sorted(package.rglob("*.py")):
        name = file.relative_to(package).as_posix()
        tree = ast.parse(file.read_text(encoding="utf-8"))
        hashed = {
            id(inner)
            for call in ast.walk(tree)
            if isinstance(call, ast.Call) and ast.unparse(call.func).startswith(("hashlib.", "content.update"))
            for inner in ast.walk(call)
        }
        for node in ast.walk(tree):
            writes = (
                isinstance(node, ast.Attribute)
                and node.attr in ("dump", "dumps", "JSONEncoder")
                and ast.unparse(node.value) == "json"
            )
            imports = isinstance(node, ast.ImportFrom) and node.module in ("json", "simplejson", "orjson")
            if (writes or imports) and id(node) not in hashed and not name.startswith(PIPES):
                found.append(f"{name}:{node.lineno}")
    assert found == []
