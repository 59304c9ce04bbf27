"""Rows of data files as examples: held out without being read, checked once, and known by their question."""

from __future__ import annotations

import json
import os
import time

import pytest

from nalora import tasks
from nalora.errors import NALoRAError
from nalora.tasks import example_rows
from nalora.tasks.example_rows import ExampleRows, checked_rows


def written(file, count):
    rows = [{"question": f"{n % (count - 3)} + 1 =", "answer": n} for n in range(count)]
    file.write_text("\n".join(map(json.dumps, rows)))
    return str(file)


@pytest.fixture
def settled(tmp_path, monkeypatch):
    """A file that is old enough for its time to show whether it was written to."""
    monkeypatch.setattr(example_rows, "_kept", {})
    file = written(tmp_path / "sums.jsonl", 60)
    past = time.time() - 10
    os.utime(file, (past, past))
    monkeypatch.setattr("nalora.models.file_digest._TICK", 0)
    return file


def test_validation_rows_are_held_out_without_reading_a_row(settled, monkeypatch):
    task = tasks.get(settled)
    monkeypatch.setattr(ExampleRows, "_example", lambda *_: pytest.fail("a row was read"))
    train, held = task.validation_split(10)
    assert len(held) == 10
    assert not set(train.keys) & set(held.keys)
    # Only rows with the question of a held-out row are lost.
    lost = set(task.training_set().places) - {*train.places, *held.places}
    assert all(train.checked.keys[place] in set(held.keys) for place in lost)
    with pytest.raises(NALoRAError, match="fewer held-out examples"):
        task.validation_split(1000)


def test_the_choice_does_not_depend_on_the_file_s_name(settled, tmp_path):
    (tmp_path / "other.jsonl").write_bytes((tmp_path / "sums.jsonl").read_bytes())
    one, other = (tasks.get(str(tmp_path / name)) for name in ("sums.jsonl", "other.jsonl"))
    assert [e.id for e in one.validation_split(10)[1]] == [e.id for e in other.validation_split(10)[1]]
    assert [e.id for e in one.test_examples()] == [e.id for e in other.test_examples()]


def test_a_file_is_checked_again_only_after_a_change(settled):
    def opened():
        return checked_rows(settled, "train", None, None, lambda *_: None)

    first = opened()
    assert opened() is first
    assert checked_rows(settled, "train", None, {"question": "answer", "answer": "question"}, print) is not first
    with open(settled, "a") as file:
        file.write('\n{"question": "?", "answer": "!"}')
    assert len(opened().rows) == 61


def test_rows_are_grouped_by_their_turns(tmp_path):
    turns = [("user", "assistant"), ("system", "user", "assistant"), ("user", "assistant")]
    rows = [{"messages": [{"role": role, "content": f"{n}"} for role in roles]} for n, roles in enumerate(turns)]
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, rows)))
    opened = ExampleRows(checked_rows(str(tmp_path / "chat.jsonl"), "train", None, None, lambda *_: None), "train")
    groups = [(where.rpartition(":")[2], count, len(e.messages)) for where, count, e in opened.one_of_each()]
    assert groups == [("1", 2, 2), ("2", 1, 3)]


def test_progress_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(example_rows, "REPORTED_ROWS", 20)
    reported = []
    tasks.get(written(tmp_path / "sums.jsonl", 50), report=lambda *progress: reported.append(progress))
    assert ("reading sums.jsonl (MB)", 0, 0) in reported
    assert [progress for progress in reported if progress[0] == "checking rows"] == [
        ("checking rows", done, 50) for done in (20, 40, 50)
    ]
