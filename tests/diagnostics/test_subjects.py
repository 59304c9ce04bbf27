"""Adapters of somebody's own Trainer are diagnosed like the run that trained the same."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import tiny

import nalora
from nalora.diagnostics.dynamics import diagnose
from nalora.diagnostics.inputs import DiagnosisOptions
from nalora.diagnostics.mismatch import diagnose_against
from nalora.diagnostics.subjects import adapter_states
from nalora.runs.settings import check
from nalora.training.run import train

PROBE = DiagnosisOptions(probe_size=8, task="gym/chain_sum")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run with checkpoints, whose task has the settings that it has on the command line."""
    place = tmp_path_factory.mktemp("trained")
    train(check({
        "model": tiny.saved_llama(place / "base", layers=1), "task": "gym/chain_sum", "steps": 4, "batch_size": 4,
        "learning_rate": 1e-2, "device": "cpu", "method": "na-lora", "save_every": 2, "train_limit": 16,
        "output": str(place / "run"),
    }))  # fmt: skip
    return place


@pytest.fixture
def outside(trained, tmp_path, monkeypatch):
    """Its adapter with the checkpoints, as a Trainer's output folder has them."""
    folder = tmp_path / "theirs"
    shutil.copytree(trained / "run" / "adapter", folder)
    for checkpoint in (trained / "run" / "checkpoints").glob("checkpoint-*"):
        shutil.copytree(checkpoint, folder / checkpoint.name)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return folder


def files(folder):
    return sorted(path for path in folder.rglob("*"))


def test_checkpoints_are_the_snapshots_of_an_adapter(trained, outside):
    before = files(outside)
    result = diagnose(outside, PROBE)
    of_run = diagnose(trained / "run", DiagnosisOptions(probe_size=8))
    assert result["steps"] == of_run["steps"] == [0, 2, 4]
    for name in ("intervals", "first_to_last", "shares", "blocks", "histogram"):
        assert result[name] == of_run[name]
    assert files(outside) == before, "nothing is written into somebody's folder"
    (written,) = (outside.parent / "elsewhere").rglob("diagnosis.json")
    assert json.loads(written.read_text()) == result
    assert "runs/evaluations" in str(written)
    for _ in range(2):  # its own files are replaced
        diagnose(outside, replace(PROBE, per_channel=True))


def test_states_of_folders(outside):
    assert [(state.step, state.folder) for state in adapter_states(outside)] == [
        (0, None), (2, outside / "checkpoint-2"), (4, outside / "checkpoint-4"),
    ]  # fmt: skip
    shutil.rmtree(outside / "checkpoint-4")
    assert adapter_states(outside)[-1] == (3, outside), "the adapter itself, after the last checkpoint"
    shutil.rmtree(outside / "checkpoint-2")
    assert adapter_states(outside) == [(0, None), (1, outside)]


def test_an_adapter_against_its_base_and_against_its_run(trained, outside, tmp_path):
    base = str(trained / "base")
    result = diagnose_against(outside, base, PROBE)
    of_run = diagnose_against(trained / "run", base, DiagnosisOptions(probe_size=8))
    assert {**result, "run": "", "mask": 0, "mask_step": 0} == {**of_run, "run": "", "mask": 0, "mask_step": 0}
    assert max(result["energy"]["total"]) > 0
    options = replace(PROBE, model=base, output=tmp_path / "chosen")
    same = diagnose_against(outside, str(trained / "run"), options)
    assert max(same["energy"]["total"]) == 0
    assert (tmp_path / "chosen" / "mismatch.json").is_file()


def test_what_is_missing_or_in_the_way_is_named(trained, outside, tmp_path):
    with pytest.raises(nalora.NALoRAError, match="an adapter without a task"):
        diagnose(outside)
    with pytest.raises(nalora.NALoRAError, match="no run"):
        diagnose(trained / "base", PROBE)
    mine = tmp_path / "mine"
    mine.mkdir()
    for name in ("diagnosis.json", "diagnosis_channels.safetensors"):
        (mine / name).write_text('{"mine": 1}')
        options = replace(PROBE, output=mine, per_channel=True)
        with pytest.raises(nalora.NALoRAError, match="a file that is not a diagnosis written by nalora"):
            diagnose(outside, options)
        (mine / name).unlink()
    config = outside / "checkpoint-4" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": "/nowhere"}))
    with pytest.raises(nalora.NALoRAError, match="--model BASE"):
        diagnose(outside, PROBE)
