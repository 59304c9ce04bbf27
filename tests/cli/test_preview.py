"""`nalora train --dry-run` as a user types it."""

from __future__ import annotations

import os
import signal
import tempfile

import pytest
import tiny

from nalora.training.callbacks import GracefulStop


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny.saved_llama(tmp_path_factory.mktemp("base"))


@pytest.fixture
def recipe(tmp_path, base):
    file = tmp_path / "run.yaml"
    file.write_text(
        f"model: {base}\ntask: gym/chain_sum\ntrain_size: 20\ntest_size: 8\nsteps: 10\nbatch_size: 4\ndevice: cpu\n"
        f"output: {tmp_path / 'run'}\nmethod: na-lora\non: peft/gralora\n"
    )
    return file


def test_it_prints_what_would_be_trained_and_trains_nothing(run, recipe, tmp_path):
    code, out, _ = run("train", recipe, "--dry-run")
    assert code == 0, out
    for part in (
        "20 examples in 20 rows", "tokens per row on average", "10 of 4 rows", "2 times the data", "trained,", "% of",
        "weights", "gradients", "optimizer state", "activations", "an estimate", "the process about", "add --measure",
        "adapter",        "checkpoints", "are free", "NA-LoRA plan: 2 FFN block(s)", "Nothing was trained",
    ):  # fmt: skip
        assert part in out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.yaml"]


def test_measured_steps_give_the_time_and_the_peak(run, recipe, tmp_path):
    code, out, _ = run("train", recipe, "--dry-run", "--measure")
    assert code == 0, out
    assert "s per step" in out
    assert "4 steps measured on this machine" in out
    assert "the process's peak" in out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.yaml"]


def test_stopped_in_a_measured_step_it_leaves_nothing(run, recipe, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(GracefulStop, "on_step_begin", lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM))
    code, out, _ = run("train", recipe, "--dry-run", "--measure")
    assert code == 130
    assert "stopped; nothing was kept" in out
    assert list((tmp_path / "temporary").iterdir()) == []


def test_what_would_stop_the_run_is_named(run, recipe, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine").write_text("mine")
    code, out, _ = run("train", recipe, "max_length=3", "--dry-run")
    assert code == 2
    assert out.count("Problem: ") == 2
    assert "none of at most 3 tokens" in out
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["mine"]


def test_a_missing_judge_is_a_problem(run, recipe, tmp_path, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    code, out, _ = run("train", recipe, "task=mt-bench", "train_size=", "test_size=", "steps=2", "--dry-run")
    assert code == 2
    assert "judge" in out


def test_what_is_fused_and_in_fp8_is_printed(run, recipe):
    pytest.importorskip("triton")
    code, out, _ = run("train", recipe, "method=lora", "on=", "base=fp8", "--dry-run")
    assert code == 0, out
    for part in (
        "14 of 14 LoRA layers would be fused",
        "base in FP8: 14 linear layers",
        "linear layers of the base in",
    ):
        assert part in out
    code, out, _ = run("train", recipe, "method=lora", "on=", "--dry-run")
    assert code == 0, out
    assert "LoRA layers" not in out


def test_a_run_of_one_epoch_trains_once_on_the_data(run, recipe):
    """20 rows in batches of 16: the second has four rows."""
    code, out, _ = run("train", recipe, "steps=", "epochs=1", "batch_size=16", "--dry-run")
    assert code == 0, out
    assert "2 of 16 rows" in out
    assert "each; 1 times the data" in out


def test_stop_after_too_many_steps_is_a_problem_and_the_steps_are_those_of_the_run(run, recipe):
    code, out, _ = run("train", recipe, "steps=", "epochs=2", "stop_after=50", "--dry-run")
    assert code == 2
    assert "10 of 4 rows " in out
    assert "2 times the data" in out
    assert "Problem: stop_after: 50: found a run of 10 steps" in out
