"""Entries of Python files that users name: found by path and name, read again after a change."""

from __future__ import annotations

import os
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nalora.errors import NALoRAError
from nalora.files import python_files

FILE = """
class One:
    name = "one"

class Two:
    name = "two"

TASKS = (One, Two)
"""


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a.py", ("a.py", None)),
        ("folder/a.py:one", ("folder/a.py", "one")),
        ("c:/a.py", ("c:/a.py", None)),
        ("gsm8k", None),
        ("a.pyc", None),
        (None, None),
    ],
)
def test_paths_of_python_files(text, parts):
    assert python_files.split(text) == parts


@given(st.text(min_size=1, max_size=20), st.text("abc-", min_size=1))
def test_a_file_and_its_entry_are_separated(path, entry):
    assert python_files.split(f"{path}.py:{entry}") == (f"{path}.py", entry)
    assert python_files.split(f"{path}.py/{entry}") is None


def test_the_first_entry_or_the_named_one(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(FILE)
    assert python_files.entry("task", str(file), "TASKS").name == "one"
    assert python_files.entry("task", f"{file}:two", "TASKS").name == "two"
    with pytest.raises(NALoRAError, match="did you mean two"):
        python_files.entry("task", f"{file}:tow", "TASKS")
    with pytest.raises(NALoRAError, match="no METHODS in the file"):
        python_files.entry("method", str(file), "METHODS")
    with pytest.raises(NALoRAError, match="no such file"):
        python_files.entry("task", str(tmp_path / "none.py"), "TASKS")


def test_a_changed_file_is_read_again(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("VALUE = 1\n")
    first = python_files.load(file)
    assert python_files.load(file) is first
    file.write_text("VALUE = 22\n")
    os.utime(file, ns=(1, 1))
    assert python_files.load(file).VALUE == 22
    assert "mine" not in sys.modules
