"""Movement of gates and weights in the log's rows of early steps: right, and without any effect on the run."""

from __future__ import annotations

import json

import pytest
import tiny
from safetensors.torch import load_file
from stopped_runs import train_and_stop

from nalora.diagnostics.dynamics import diagnose
from nalora.diagnostics.inputs import DiagnosisOptions
from nalora.errors import NALoRAError
from nalora.runs.folder import RunFolder
from nalora.runs.settings import check
from nalora.training.gate_movement import MEASURES
from nalora.training.run import train

NAMES = {*(f"movement/{name}" for name in MEASURES), "movement/update_to_weight"}


@pytest.fixture
def settings(tmp_path):
    return {
        "model": tiny.saved_llama(tmp_path / "base"), "task": "gym/chain_sum", "train_size": 16, "test_size": 8,
        "settings": {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}, "rank": 4,
        "output": str(tmp_path / "run"), "steps": 6, "batch_size": 4, "learning_rate": 1e-2, "device": "cpu",
        "log_every": 1, "max_length": 128, "gate_movement_steps": [2, 4],
    }  # fmt: skip


def rows(folder) -> dict[int, dict]:
    lines = RunFolder(folder).metrics.read_text().splitlines()
    return {row["step"]: row for row in map(json.loads, lines)}


def test_the_measures_are_those_of_a_diagnosis_of_the_same_examples(settings):
    train(check({**settings, "snapshot_every": 2}))
    logged = rows(settings["output"])
    assert [step for step, row in logged.items() if NAMES & row.keys()] == [2, 4]
    assert logged[2].keys() >= NAMES
    diagnosis = diagnose(settings["output"], DiagnosisOptions(probe_size=16, device="cpu"))
    first = diagnosis["intervals"][0]
    assert (first["from"], first["to"]) == (0, 2)
    for name in MEASURES:
        mean = sum(first[name]) / len(first[name])
        assert logged[2][f"movement/{name}"] == pytest.approx(mean, rel=1e-4, abs=1e-9)
    assert 0 < logged[2]["movement/D_sel"] < logged[4]["movement/D_sel"]
    assert 0 < logged[2]["movement/update_to_weight"] < logged[4]["movement/update_to_weight"]


@pytest.mark.parametrize("method", [{"method": "lora", "dropout": 0.1}, {"method": "peft/gralora", "gralora_k": 2}])
def test_a_recorded_run_has_the_same_result_bit_for_bit(settings, method, tmp_path):
    train(check({**settings, **method}))
    train(check({**settings, **method, "gate_movement_steps": None, "output": str(tmp_path / "plain")}))
    recorded, plain = (load_file(RunFolder(f).adapter / "adapter_model.safetensors") for f in
                       (settings["output"], tmp_path / "plain"))  # fmt: skip
    assert recorded.keys() == plain.keys()
    assert all((recorded[name] == plain[name]).all() for name in plain)
    assert rows(settings["output"])[2].keys() >= NAMES
    assert not NAMES & rows(tmp_path / "plain")[2].keys()


def test_chosen_steps_are_logged_between_the_others(settings):
    train(check({**settings, "log_every": 5}))
    assert [step for step, row in rows(settings["output"]).items() if "movement/flip" in row] == [2, 4]


def test_full_fine_tuning_has_gates_and_no_adapter_to_compare_with_its_weights(settings):
    train(check({**settings, "method": "full", "learning_rate": 1e-3}))
    row = rows(settings["output"])[2]
    assert row["movement/D_sel"] > 0
    assert "movement/update_to_weight" not in row


def test_a_resumed_run_does_not_compare_with_the_gates_of_another_step(settings, monkeypatch):
    run = check({**settings, "steps": 6, "gate_movement_steps": [2, 5]})
    train_and_stop(run, monkeypatch, after=3)
    train(run, resume=True)
    assert [step for step, row in rows(settings["output"]).items() if "movement/flip" in row] == [2]


def test_steps_must_be_positive(settings):
    with pytest.raises(NALoRAError, match="gate_movement_steps"):
        check({**settings, "gate_movement_steps": [0, 10]})


def test_a_range_test_rises_to_its_learning_rate_by_the_same_factor(settings):
    train(check({**settings, "schedule": "range_test", "steps": 6, "gate_movement_steps": None}))
    rates = [row["learning_rate"] for row in rows(settings["output"]).values()]
    assert rates == pytest.approx([1e-2 * 1000 ** (step / 6 - 1) for step in range(1, 7)], rel=1e-6)
