"""`nalora diagnose` as a user types it."""

from __future__ import annotations

import json

import tiny

from nalora.runs.settings import check
from nalora.training.run import train


def test_diagnose(run, tmp_path):
    train(check({
        "model": tiny.saved_llama(tmp_path / "base"), "task": "gym/chain_sum", "train_size": 12, "test_size": 4,
        "output": str(tmp_path / "run"), "steps": 2, "batch_size": 4, "device": "cpu", "snapshot_every": 1,
        "learning_rate": 1e-2,
    }))  # fmt: skip
    code, out, err = run("diagnose", tmp_path / "run", "--probe-size", 8, "--batch-size", 4, "--per-channel")
    assert code == 0, err
    for part in ("0 → 1", "1 → 2", "all intervals together", "0 → 2 directly", "model.layers.1.mlp", "κ drift",
                 "2 forward passes for each of 3 states", "diagnosis.json"):  # fmt: skip
        assert part in out, part
    found = json.loads((tmp_path / "run" / "diagnosis.json").read_text())
    assert found["probe"]["examples"] == 8
    assert f"{sum(found['cumulative']['D_sel']) / 2:.5f}" in out
    code, out, _ = run("diagnose", tmp_path / "run", "--probe-size", 4, "--every", 2, "--task", "gym/letter_counting")
    assert code == 0
    assert "gym/letter_counting" in out
    assert "0 → 1" not in out


def test_mistakes_are_one_line(run, tmp_path):
    code, _, err = run("diagnose", tmp_path)
    assert code == 2
    assert err.startswith("nalora: ")
    assert "no run" in err
    assert err.count("\n") == 1
