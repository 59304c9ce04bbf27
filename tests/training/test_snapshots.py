"""Records of a run's gates: complete snapshots at the configured steps, rows for every block."""

from __future__ import annotations

import json

import peft
import pytest
import tiny
import torch
import transformers
from safetensors.torch import load_file
from stopped_runs import train_and_stop

from nalora.control import checkpoint, metrics
from nalora.runs.folder import RunFolder
from nalora.runs.settings import check
from nalora.training.run import train
from nalora.training.snapshots import _rounded


@pytest.fixture
def settings(tmp_path):
    return {
        "model": tiny.saved_llama(tmp_path / "base"), "task": "gym/chain_sum",
        "settings": {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 3},
        "train_size": 24, "test_size": 8, "output": str(tmp_path / "run"), "steps": 5, "batch_size": 4,
        "learning_rate": 1e-2, "log_every": 1, "device": "cpu", "max_length": 128, "snapshot_every": 2,
    }  # fmt: skip


def rows(folder):
    return [json.loads(line) for line in RunFolder(folder).gates.read_text().splitlines()]


def weights(folder, step):
    return load_file(RunFolder(folder).snapshot(step) / "adapter_model.safetensors")


def test_snapshots_are_ordinary_adapters_with_the_controllers_state(settings):
    train(check({**settings, "method": "na-lora"}))
    folder = RunFolder(settings["output"])
    assert folder.snapshot_steps() == [0, 2, 4, 5]
    assert not list(folder.snapshots.glob(".*"))
    final = load_file(folder.adapter / "adapter_model.safetensors")
    assert all(torch.equal(final[name], tensor) for name, tensor in weights(settings["output"], 5).items())
    start = weights(settings["output"], 0)
    assert all(not tensor.any() for name, tensor in start.items() if "lora_B" in name)
    base = transformers.AutoModelForCausalLM.from_pretrained(settings["model"])
    peft.PeftModel.from_pretrained(base, folder.snapshot(2))
    mask = checkpoint.load(folder.snapshot(4))["tensors"]["base_model.model.model.layers.0.mlp/mask"]
    assert mask.shape == (64,)
    assert mask.min() < 1


def test_gates_jsonl_has_every_block_at_every_logged_step(settings):
    train(check({**settings, "method": "na-lora", "snapshot_every": 0}))
    header, *steps = rows(settings["output"])
    assert header["blocks"] == ["model.layers.0.mlp", "model.layers.1.mlp"]
    assert header["activations"] == ["silu", "silu"]
    assert header["thresholds"][0] == pytest.approx([-1.2785, 1.2785], abs=1e-3)
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5]
    logged = [json.loads(line) for line in RunFolder(settings["output"]).metrics.read_text().splitlines()]
    for row, means in zip(steps, logged, strict=True):
        assert set(row) == {"step", *metrics.NAMES}
        for name in set(metrics.NAMES) - {"skipped_updates"}:
            assert sum(row[name]) / 2 == pytest.approx(means[f"nalora/{name}"], rel=1e-4)
    assert not RunFolder(settings["output"]).snapshots.exists()


def test_a_run_without_gates_to_record_has_no_such_file(settings):
    train(check({**settings, "method": "lora", "steps": 2}))
    assert not RunFolder(settings["output"]).gates.exists()
    assert RunFolder(settings["output"]).snapshot_steps() == [0, 2]


def test_full_fine_tuning_keeps_models(settings):
    train(check({**settings, "method": "full", "steps": 2}))
    folder = RunFolder(settings["output"])
    base = transformers.AutoModelForCausalLM.from_pretrained(settings["model"])
    first, last = (transformers.AutoModelForCausalLM.from_pretrained(folder.snapshot(step)) for step in (0, 2))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), base.parameters(), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(last.parameters(), base.parameters(), strict=True))


def test_a_method_that_moves_the_base_keeps_adapters_of_the_stock_one(settings):
    train(check({**settings, "method": "pissa", "rank": 4, "steps": 2}))
    folder = RunFolder(settings["output"])
    batch = {"input_ids": tiny.tokens(2, 8)}
    base = transformers.AutoModelForCausalLM.from_pretrained(settings["model"])
    with torch.no_grad():
        plain = base(**batch).logits
        started = peft.PeftModel.from_pretrained(base, folder.snapshot(0)).eval()(**batch).logits
    torch.testing.assert_close(started, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("interrupted_after", [1, 3])
def test_a_resumed_run_ends_with_the_same_record(settings, tmp_path, monkeypatch, interrupted_after):
    whole = {**settings, "method": "na-lora", "output": str(tmp_path / "whole")}
    train(check(whole))
    halves = check({**settings, "method": "na-lora"})
    train_and_stop(halves, monkeypatch, after=interrupted_after)
    folder = RunFolder(settings["output"])
    # As a kill leaves it after the checkpoint: a later snapshot, one half written, and a row cut short.
    folder.snapshot(4).mkdir()
    (folder.snapshots / ".step-00000004.1").mkdir()
    with folder.gates.open("a") as file:
        file.write('{"step": 9, "p_s')
    train(halves, resume=True)
    assert rows(settings["output"]) == rows(whole["output"])
    assert folder.snapshot_steps() == [0, 2, 4, 5]
    assert not list(folder.snapshots.glob(".*"))
    for step in (2, 4, 5):
        ours, theirs = weights(settings["output"], step), weights(whole["output"], step)
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_five_significant_digits():
    assert _rounded(0.123456789) == 0.12346
    assert _rounded(123456.789) == 123460.0
    assert _rounded(1.0) == 1.0


def test_settings_have_limits():
    given = {"model": "m", "task": "gym/chain_sum", "snapshot_every": -1, "save_every": -2}
    with pytest.raises(Exception, match="snapshot_every.*save_every|save_every.*snapshot_every"):
        check(given)
