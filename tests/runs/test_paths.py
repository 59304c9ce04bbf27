"""A run whose model and data were named by relative paths is found from every folder, and so is its adapter's base."""

from __future__ import annotations

import json
import shutil

import peft
import pytest
import tiny
import yaml

from nalora.evaluation.targets import Request, evaluate_target
from nalora.runs.folder import RunFolder
from nalora.runs.saved_run import read_run
from nalora.runs.settings import check
from nalora.training.run import train


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with a model, and a run that was started in it."""
    folder = tmp_path / "project"
    folder.mkdir()
    tiny.saved_llama(folder / "base", layers=1)
    monkeypatch.chdir(folder)
    train(check({
        "model": "base", "task": "gym/chain_sum", "train_size": 8, "test_size": 2, "max_new_tokens": 2, "steps": 1,
        "batch_size": 2, "device": "cpu", "output": "runs/one",
    }))  # fmt: skip
    (tmp_path / "elsewhere").mkdir()
    return folder


def test_a_run_is_evaluated_from_another_folder_as_from_its_own(project, tmp_path, monkeypatch):
    here = evaluate_target("runs/one", Request())
    monkeypatch.chdir(tmp_path / "elsewhere")
    there = evaluate_target(str(project / "runs" / "one"), Request())
    assert {who: each["folder"] for who, each in there.items()} == {
        who: str(project / each["folder"]) for who, each in here.items()
    }, "and it reuses the same outputs"
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_the_adapter_names_a_base_that_loads_from_anywhere(project, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path / "elsewhere")
    peft.AutoPeftModelForCausalLM.from_pretrained(project / "runs" / "one" / "adapter")


def test_the_run_s_files_name_no_absolute_folder(project, tmp_path):
    folder = project / "runs" / "one"
    assert yaml.safe_load((folder / "run.yaml").read_text())["model"] == "base"
    assert json.loads((folder / "environment.json").read_text())["working_directory"] == "../.."
    for name in ("run.yaml", "result.json", "environment.json"):
        assert str(tmp_path) not in (folder / name).read_text()


def test_a_project_that_moved_as_a_whole_stays_whole(project, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path / "elsewhere")
    shutil.move(project, tmp_path / "moved")
    run = read_run(RunFolder(tmp_path / "moved" / "runs" / "one"))
    assert run.settings.model == str(tmp_path / "moved" / "base")


def test_names_that_are_no_paths_stay_what_they_are(project, tmp_path, monkeypatch):
    folder = RunFolder(project / "runs" / "one")
    folder.write_settings(yaml.safe_load(folder.settings.read_text()) | {"model": "owner/name"})
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert read_run(folder).settings.model == "owner/name"


def test_a_run_of_version_0_1_is_read_as_before(project, tmp_path, monkeypatch):
    folder = RunFolder(project / "runs" / "one")
    environment = json.loads((folder.path / "environment.json").read_text())
    del environment["working_directory"]
    (folder.path / "environment.json").write_text(json.dumps(environment))
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert read_run(folder).settings.model == "base"
