"""A run is resumed on the data that it was started on: files may move, but their content may not change."""

from __future__ import annotations

import json
import shutil

import pytest
import tiny
from stopped_runs import train_and_stop

from nalora import NALoRAError
from nalora.runs.data_record import changes, equal_in_content
from nalora.runs.folder import RunFolder
from nalora.runs.settings import check
from nalora.training.run import train


def written(file, count):
    file.parent.mkdir(exist_ok=True)
    file.write_text("\n".join(json.dumps({"question": f"{n} + 1 =", "answer": n + 1}) for n in range(count)))
    return str(file)


@pytest.fixture
def stopped(tmp_path, monkeypatch):
    """The settings of a run on a folder of files that was stopped after two of four steps."""
    written(tmp_path / "data" / "train.jsonl", 30)
    written(tmp_path / "data" / "test.jsonl", 5)
    settings = {
        "model": tiny.saved_llama(tmp_path / "base", layers=1), "task": str(tmp_path / "data"), "max_length": 64,
        "output": str(tmp_path / "run"), "steps": 4, "batch_size": 4, "device": "cpu", "score": str(tmp_path / "s.py"),
    }  # fmt: skip
    (tmp_path / "s.py").write_text("def score(question, expected, output):\n    return 1\n")
    train_and_stop(check(settings), monkeypatch, 2)
    return settings


def test_edited_data_is_refused_in_one_sentence(stopped, tmp_path):
    written(tmp_path / "data" / "train.jsonl", 31)
    written(tmp_path / "data" / "more.csv", 3)
    with pytest.raises(NALoRAError) as refused:
        train(check(stopped), resume=True)
    assert refused.value.found == "a run that was started on other data: more.csv is new, train.jsonl was edited"
    assert "\n" not in str(refused.value)
    (tmp_path / "data" / "more.csv").unlink()
    written(tmp_path / "data" / "train.jsonl", 30)
    (tmp_path / "s.py").write_text("def score(question, expected, output):\n    return 0\n")
    with pytest.raises(NALoRAError, match=r"s\.py was edited"):
        train(check(stopped), resume=True)


def test_files_that_moved_are_the_same_data(stopped, tmp_path):
    moved = stopped | {"task": str(tmp_path / "elsewhere"), "score": str(tmp_path / "elsewhere" / "own.py")}
    shutil.move(tmp_path / "data", moved["task"])
    shutil.move(tmp_path / "s.py", moved["score"])
    assert train(check(moved), resume=True)["steps"] == 4
    assert f"task: {moved['task']}" in RunFolder(stopped["output"]).settings.read_text()


def test_other_settings_are_still_refused(stopped, tmp_path):
    with pytest.raises(NALoRAError, match=r"other settings: .*max_new_tokens"):
        train(check(stopped | {"max_new_tokens": 3}), resume=True)
    with pytest.raises(NALoRAError, match=r"data: train\.jsonl is missing.* `nalora train .*run --resume --trust`"):
        train(check(stopped | {"task": written(tmp_path / "other" / "test.jsonl", 5)}), resume=True)


def test_a_run_without_a_record_is_not_refused():
    assert changes({}, {"task": {"a.jsonl": "1"}}) == []
    assert equal_in_content({}, {"task": {"a.jsonl": "1"}}) == set()
    assert equal_in_content({"task": {"a.jsonl": "1"}}, {"task": {"b.jsonl": "1"}}) == {"task"}


def test_data_that_the_command_names_is_told_from_data_that_is_gone():
    before = {"task": {"chat.jsonl": "1"}}
    assert changes(before, {"task": {"sums.jsonl": "2"}}) == ["chat.jsonl, and not on sums.jsonl"]
    assert changes(before, {"task": {"data/chat.jsonl": ""}}) == ["chat.jsonl is missing"]
    assert equal_in_content({"task": {"hub:a/b": ""}}, {"task": {"hub:a/c": ""}}) == set()
    assert changes({"task": {"hub:a/b": ""}}, {"task": {"hub:a/b": ""}}) == []
