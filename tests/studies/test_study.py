"""A whole study on a small real model: trained, chosen, asked, compared; from the command line."""

from __future__ import annotations

import json

import pytest
import tiny
import yaml
from typer.testing import CliRunner

from nalora.cli import app
from nalora.studies.store import ANSWERS, TEST, VALIDATION, Store


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    described = {
        "settings": {
            "model": tiny.saved_llama(tmp_path / "base"), "task": "gym/chain_sum", "train_size": 40, "test_size": 6,
            "settings": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}, "rank": 4, "steps": 3,
            "batch_size": 4, "device": "cpu", "max_new_tokens": 4,
        },
        "arms": {"lora": {"method": "lora"}, "na-lora": {"method": "na-lora", "apply_to": "update"}},
        "learning_rates": [1e-3, 1e-2], "validation_size": 8, "seeds": [0, 1],
    }  # fmt: skip
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(described, sort_keys=False))
    return path


def test_a_study_from_its_file_to_its_answer(file, tmp_path):
    store = tmp_path / "store"
    command = ["study", str(file), "--store", str(store), "--workers", "2"]
    planned = CliRunner().invoke(app, [*command, "--dry-run"])
    assert "6 runs in all" in planned.output
    assert not store.exists()
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    runs = [Store(store).result(folder.name) for folder in store.iterdir() if folder.is_dir()]
    assert len(runs) == 6
    assert all(run.has(VALIDATION) for run in runs)
    assert sum(run.has(TEST) and run.has(ANSWERS) for run in runs) == 4, "the test set is for the chosen runs alone"
    (part,) = json.loads((store / "small.json").read_text())
    assert set(part["values"]) == {"lora", "na-lora"}
    assert part["measures"][0] == "test loss"
    assert all(len(seeds) == 2 for cells in part["values"].values() for seeds in cells)
    assert len(part["sentences"]) == len(part["measures"])
    stamps = {file: file.stat().st_mtime_ns for file in store.rglob("result.json")}
    again = CliRunner().invoke(app, command)
    assert again.exit_code == 0
    assert stamps == {file: file.stat().st_mtime_ns for file in store.rglob("result.json")}


def test_a_study_that_cannot_run_says_so_and_starts_nothing(file, tmp_path):
    described = yaml.safe_load(file.read_text())
    described["arms"]["lorra"] = {"method": "lorra"}
    file.write_text(yaml.safe_dump(described))
    refused = CliRunner().invoke(app, ["study", str(file), "--store", str(tmp_path / "store")])
    assert "did you mean 'lora'" in str(refused.exception)
    assert not (tmp_path / "store").exists()
