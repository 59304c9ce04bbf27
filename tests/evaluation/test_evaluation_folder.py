"""The folder of an evaluation contains its own files and no symbolic links."""

from __future__ import annotations

import pytest

import nalora
from nalora.evaluation.folder import Records, claimed_folder
from nalora.runs import marker


@pytest.mark.parametrize("name", ["outputs.jsonl", "scores.jsonl", "losses.jsonl", "judgements.jsonl", "summary.json"])
def test_symbolic_links_are_refused_and_their_targets_unchanged(tmp_path, name):
    theirs = tmp_path / "theirs.txt"
    theirs.write_text("a line\nhalf a li")
    folder = tmp_path / "evaluation"
    folder.mkdir()
    marker.mark(folder, "evaluation")
    (folder / name).symlink_to(theirs)
    with pytest.raises(nalora.NALoRAError, match="a symbolic link"), claimed_folder(folder):
        Records(folder / name)
    assert theirs.read_text() == "a line\nhalf a li"


def test_a_folder_in_the_place_of_a_file_is_refused(tmp_path):
    (tmp_path / "evaluation" / "outputs.jsonl").mkdir(parents=True)
    marker.mark(tmp_path / "evaluation", "evaluation")
    with pytest.raises(nalora.NALoRAError, match="no file"), claimed_folder(tmp_path / "evaluation"):
        pass


@pytest.mark.parametrize("row", ['{"a": 1}', "5", "{", '{"id": [], "scores": {}}', '{"id": "x"}'])
def test_a_row_of_another_form_is_refused_by_file_and_line(tmp_path, row):
    file = tmp_path / "scores.jsonl"
    file.write_text('{"id": "1", "scores": {}}\n' + row + '\n{"id": "3", "scores": {}}\n')
    with pytest.raises(nalora.NALoRAError, match="scores.jsonl, line 2"):
        Records(file)
    assert row in file.read_text()


def refused(folder, write=lambda: None):
    def fail():
        write()
        raise RuntimeError("as asked")

    with pytest.raises(RuntimeError), claimed_folder(folder):
        fail()


def test_a_refusal_leaves_no_folder_with_only_the_marker(tmp_path):
    folder = tmp_path / "evaluation"
    refused(folder)
    assert not folder.exists()
    folder.mkdir()
    refused(folder)
    assert list(folder.iterdir()) == []
    refused(folder, (folder / "outputs.jsonl").touch)
    assert {entry.name for entry in folder.iterdir()} == {marker.MARKER, "outputs.jsonl"}
    (folder / "outputs.jsonl").unlink()
    refused(folder)  # the marker is an earlier process's
    assert {entry.name for entry in folder.iterdir()} == {marker.MARKER}
