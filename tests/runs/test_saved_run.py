"""A run is read from its folder with its settings; a missing or unfinished one is an error in every command."""

from __future__ import annotations

import pytest

from nalora import NALoRAError
from nalora.evaluation.targets import Request, evaluate_target
from nalora.runs.folder import RunFolder
from nalora.runs.saved_run import finished_run, read_run
from nalora.runs.settings import check

SETTINGS = {"model": "m", "task": "gym/chain_sum", "method": "lora", "train_size": 24}


@pytest.fixture
def folder(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.open(check(SETTINGS).to_dict(), resume=False)
    return folder


def test_the_settings_come_back(folder):
    assert read_run(folder).to_dict() == check(SETTINGS).to_dict()


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "no run"), ("a: [", "no YAML"), ("- a\n", "`key: value` lines"), ("", "model: missing")],
)
def test_a_folder_without_a_run_is_an_error(folder, text, message):
    folder.settings.unlink()
    if text is not None:
        folder.settings.write_text(text)
    with pytest.raises(NALoRAError, match=message):
        read_run(folder)


@pytest.mark.parametrize("read", [finished_run, lambda path: evaluate_target(str(path), Request())])
def test_a_run_is_finished_when_it_has_a_result_and_what_it_trained(folder, read):
    folder.adapter.mkdir()
    with pytest.raises(NALoRAError, match="an unfinished run"):
        read(folder.path)
    folder.finish({"steps": 1})
    folder.adapter.rmdir()
    with pytest.raises(NALoRAError, match="an unfinished run"):
        read(folder.path)


def test_what_was_trained_is_the_adapter_or_the_whole_model(folder):
    folder.adapter.mkdir()
    folder.finish({"steps": 1})
    assert finished_run(folder.path).trained == folder.adapter
    folder.model.mkdir()
    assert finished_run(folder.path).trained == folder.model
