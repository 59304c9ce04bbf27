"""A run with `stop_after` is the beginning of the whole run: same losses and learning rates, bit for bit."""

from __future__ import annotations

import json

import pytest
import tiny
import torch
from safetensors.torch import load_file
from stopped_runs import train_and_stop

import nalora
from nalora.report.data import read_run
from nalora.runs.folder import RunFolder
from nalora.runs.settings import check
from nalora.studies.store import key
from nalora.training.dry_run import examine
from nalora.training.run import train


@pytest.fixture
def settings(tmp_path):
    return {
        "model": tiny.saved_llama(tmp_path / "base"), "task": "gym/chain_sum",
        "settings": {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 3},
        "train_size": 48, "test_size": 8, "output": str(tmp_path / "run"), "steps": 8, "batch_size": 8,
        "learning_rate": 1e-2, "warmup": 0.5, "log_every": 1, "device": "cpu", "max_length": 128,
    }  # fmt: skip


def metrics(folder):
    rows = [json.loads(line) for line in RunFolder(folder).metrics.read_text().splitlines()]
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


@pytest.mark.parametrize("method", ["lora", "na-lora", "adalora", "full"])
def test_its_rows_are_the_first_rows_of_the_whole_run(settings, method, tmp_path):
    whole = {**settings, "method": method, "output": str(tmp_path / "whole")}
    full = train(check(whole))
    result = train(check({**settings, "method": method, "stop_after": 3}))
    rows = metrics(settings["output"])
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert rows == metrics(whole["output"])[:3]
    assert (result["steps"], result["stopped_early"], result["planned_steps"]) == (3, True, 8)
    assert "stopped_early" not in full
    assert result["train_loss"] == pytest.approx(sum(row["loss"] for row in rows) / 3, abs=1e-4)
    assert RunFolder(settings["output"]).trained.is_dir()
    assert "stopped after 3 of 8 steps" in " ".join(read_run(settings["output"]).notices)


def test_a_run_without_a_number_of_steps_stops_too(settings, tmp_path):
    del settings["steps"]
    whole = {**settings, "epochs": 1.5, "output": str(tmp_path / "whole")}
    assert train(check(whole))["steps"] == 9
    assert train(check({**settings, "epochs": 1.5, "stop_after": 2}))["planned_steps"] == 9
    assert metrics(settings["output"]) == metrics(whole["output"])[:2]


def test_its_last_step_has_a_checkpoint_and_a_snapshot(settings):
    train(check({**settings, "stop_after": 5, "save_every": 2, "snapshot_every": 2}))
    folder = RunFolder(settings["output"])
    assert folder.snapshot_steps() == [0, 2, 4, 5]
    assert folder.latest_checkpoint() == folder.checkpoint(5)


def test_stopped_by_ctrl_c_before_it_continues_to_the_same_adapter(settings, tmp_path, monkeypatch):
    settings["stop_after"] = 5
    train(check({**settings, "output": str(tmp_path / "straight")}))
    train_and_stop(check(settings), monkeypatch, after=3)
    assert train(check(settings), resume=True)["steps"] == 5
    files = [RunFolder(tmp_path / name).adapter / "adapter_model.safetensors" for name in ("straight", "run")]
    straight, resumed = map(load_file, files)
    assert all(torch.equal(resumed[name], tensor) for name, tensor in straight.items())


def test_killed_before_its_result_was_written_it_trains_no_step_more(settings):
    run = check({**settings, "stop_after": 4, "save_every": 2})
    train(run)
    folder = RunFolder(settings["output"])
    before = metrics(settings["output"])
    folder.result.unlink()
    assert train(run, resume=True)["steps"] == 4
    assert metrics(settings["output"]) == before


def test_its_key_differs_and_that_of_a_run_without_it_is_unchanged(settings):
    assert key(check(settings)) == key(check({**settings, "stop_after": None}))
    assert key(check(settings)) != key(check({**settings, "stop_after": 3}))


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"stop_after": 0}, "stop_after: 0, expected 1 or more"),
        ({"stop_after": 8}, "stop_after: 8 with steps: 8, expected fewer than steps"),
        ({"stop_after": 3, "schedule": "range_test"}, "stop_after with schedule: range_test"),
        ({"stop_after": 3, "gate_movement_steps": [2, 6]}, r"gate_movement_steps: \[6\] with stop_after: 3"),
    ],
)
def test_contradictions_are_refused(settings, more, expected):
    with pytest.raises(nalora.NALoRAError, match=expected):
        check({**settings, **more})


def test_a_run_that_turns_out_to_be_shorter_is_refused_and_leaves_no_folder(settings, tmp_path):
    del settings["steps"]
    run = check({**settings, "stop_after": 6})
    expected = "stop_after: 6: found a run of 6 steps; expected fewer steps"
    found = examine(run)
    assert any(expected in problem for problem in found.problems)
    assert (found.steps, found.last_step) == (6, 6)
    assert found.memory is not None
    with pytest.raises(nalora.NALoRAError, match=expected):
        train(run)
    assert not (tmp_path / "run").exists()


def test_a_dry_run_counts_the_steps_up_to_it(settings):
    found = examine(check({**settings, "stop_after": 3, "snapshot_every": 2}))
    assert (found.steps, found.last_step, found.problems) == (8, 3, [])
