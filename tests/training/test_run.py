"""A run from its file to an adapter that stock PEFT loads; stopped anywhere, it ends with the same result."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import peft
import pytest
import tiny
import torch
import transformers
from rich.console import Console
from safetensors.torch import load_file
from stopped_runs import train_and_stop

import nalora
from nalora.runs.checkpoints import complete
from nalora.runs.folder import RunFolder
from nalora.runs.settings import check
from nalora.training.run import train

SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 3}


@pytest.fixture
def settings(tmp_path):
    return {
        "model": tiny.saved_llama(tmp_path / "base"), "task": "gym/chain_sum", "settings": SUMS,
        "train_size": 48, "test_size": 8,
        "output": str(tmp_path / "run"), "steps": 6, "batch_size": 8, "micro_batch_size": 4, "learning_rate": 1e-3,
        "log_every": 1, "device": "cpu", "max_length": 128,
    }  # fmt: skip


def adapter(folder):
    return load_file(RunFolder(folder).adapter / "adapter_model.safetensors")


def metrics(folder):
    rows = [json.loads(line) for line in RunFolder(folder).metrics.read_text().splitlines()]
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


@pytest.mark.parametrize("method", [{"method": "lora"}, {"method": "na-lora", "apply_to": "update"}])
def test_an_ordinary_adapter_is_saved_and_the_loss_falls(settings, method, tmp_path):
    result = train(check({**settings, **method, "steps": 30, "learning_rate": 1e-2}))
    rows = metrics(settings["output"])
    assert [row["step"] for row in rows] == list(range(1, 31))
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.15
    assert ("nalora/mask_mean" in rows[-1]) == (method["method"] == "na-lora")
    assert result["examples"] == 48
    assert result["dropped_too_long"] == result["cut_too_long"] == 0
    base = transformers.AutoModelForCausalLM.from_pretrained(settings["model"])
    model = peft.PeftModel.from_pretrained(base, RunFolder(settings["output"]).adapter)
    assert any(p.abs().sum() > 0 for n, p in model.named_parameters() if "lora_B" in n)
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert environment["versions"]["torch"] == torch.__version__.split("+")[0] or environment["versions"]["torch"]


def test_full_fine_tuning_saves_a_model(settings):
    train(check({**settings, "method": "full", "steps": 2}))
    saved = transformers.AutoModelForCausalLM.from_pretrained(RunFolder(settings["output"]).model)
    base = transformers.AutoModelForCausalLM.from_pretrained(settings["model"])
    changed = [
        n for (n, a), b in zip(saved.named_parameters(), base.parameters(), strict=True) if not torch.equal(a, b)
    ]
    assert len(changed) == len(list(base.parameters()))
    assert saved.config.use_cache


@pytest.mark.parametrize("method", [{"method": "lora"}, {"method": "na-lora"}])
def test_ctrl_c_then_resume_is_the_uninterrupted_run(settings, method, tmp_path, monkeypatch):
    listening_before = signal.getsignal(signal.SIGINT)
    whole = {**settings, **method, "output": str(tmp_path / "whole")}
    train(check(whole))
    halves = check({**settings, **method})
    train_and_stop(halves, monkeypatch, after=3)
    assert signal.getsignal(signal.SIGINT) is listening_before
    train(halves, resume=True)
    for name, tensor in adapter(whole["output"]).items():
        assert torch.equal(tensor, adapter(settings["output"])[name]), name
    assert metrics(whole["output"]) == metrics(settings["output"])


@pytest.mark.parametrize("stops", [(1,), (4,), (6,), (2, 5)])
def test_a_resumed_run_reports_all_its_steps(settings, stops, tmp_path, monkeypatch):
    # Rows of three steps each, so that a stop is within one, or at its end.
    settings |= {"steps": 8, "log_every": 3}
    whole = train(check({**settings, "output": str(tmp_path / "whole")}))
    parts = check(settings)
    for number, stop in enumerate(stops):
        train_and_stop(parts, monkeypatch, after=stop, resume=number > 0)
    resumed = train(parts, resume=True)
    assert resumed["train_loss"] == pytest.approx(whole["train_loss"], rel=1e-6)
    assert metrics(settings["output"]) == metrics(tmp_path / "whole")


def test_the_seconds_of_a_resumed_run_are_those_of_all_its_parts(settings, monkeypatch):
    run = check(settings)
    train_and_stop(run, monkeypatch, after=3)
    folder = RunFolder(settings["output"])
    file = folder.checkpoints / "checkpoint-3" / "so_far.json"
    so_far = json.loads(file.read_text())
    rows = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    assert so_far["seconds"] >= rows[-1]["seconds"]
    file.write_text(json.dumps({**so_far, "seconds": 1000.0}))
    complete(file.parent)
    assert 1000 < train(run, resume=True)["seconds"] < 1100
    rows = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    assert [row["seconds"] > 1000 for row in rows] == [False] * 3 + [True] * 3


def test_a_checkpoint_without_sums_is_resumed_from_all_the_same(settings, monkeypatch):
    run = check(settings)
    train_and_stop(run, monkeypatch, after=4)
    checkpoint = RunFolder(settings["output"]).checkpoints / "checkpoint-4"
    (checkpoint / "so_far.json").unlink()
    complete(checkpoint)
    losses = train(run, resume=True)["train_loss"]
    assert losses == pytest.approx(sum(row["loss"] for row in metrics(settings["output"])[4:]) / 2, rel=1e-6)


def test_a_checkpoint_that_was_not_finished_is_not_resumed_from(settings, tmp_path):
    whole = {**settings, "output": str(tmp_path / "whole")}
    train(check(whole))
    run = check({**settings, "save_every": 2})
    train(run)
    folder = RunFolder(settings["output"])
    assert sorted(p.name for p in folder.checkpoints.glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-6"]
    # As a kill in the middle of the last checkpoint leaves it.
    folder.result.unlink()
    (folder.checkpoints / "checkpoint-6" / "complete").unlink()
    (folder.checkpoints / "checkpoint-6" / "optimizer.pt").write_bytes(b"half")
    with folder.metrics.open("a") as file:
        file.write('{"step": 7, "lo')
    train(run, resume=True)
    assert metrics(settings["output"]) == metrics(whole["output"])
    for name, tensor in adapter(whole["output"]).items():
        assert torch.equal(tensor, adapter(settings["output"])[name]), name


def test_a_run_killed_after_its_last_step_does_not_do_one_more(settings, tmp_path):
    settings |= {
        "schedule": "constant",
        "steps": 5,
        "save_every": 2,
    }  # ends within an epoch
    whole = {**settings, "output": str(tmp_path / "whole")}
    train(check(whole))
    train(check(settings))
    folder = RunFolder(settings["output"])
    assert folder.latest_checkpoint().name == "checkpoint-5"
    folder.result.unlink()
    assert train(check(settings), resume=True)["steps"] == 5
    assert metrics(settings["output"]) == metrics(whole["output"])
    for name, tensor in adapter(whole["output"]).items():
        assert torch.equal(tensor, adapter(settings["output"])[name]), name


def test_a_folder_is_not_written_over(settings):
    run = check(settings)
    train(run)
    with pytest.raises(nalora.NALoRAError, match="a finished run"):
        train(run)
    with pytest.raises(nalora.NALoRAError, match="started with other settings: rank"):
        train(check({**settings, "rank": 4}), resume=True)
    assert train(run, resume=True)["steps"] == 6
    elsewhere = {**settings, "output": settings["output"] + "2"}
    with pytest.raises(nalora.NALoRAError, match="leave --resume out"):
        train(check(elsewhere), resume=True)
    Path(settings["output"]).rename(elsewhere["output"])
    assert train(check(elsewhere), resume=True)["steps"] == 6, "a run that was moved is the same run"


def test_a_model_that_is_not_there(settings):
    with pytest.raises(nalora.NALoRAError, match="smollm2-135m, which needs no network"):
        train(check({**settings, "model": "nobody/such-model"}))
    empty = Path(settings["output"] + "-empty")
    empty.mkdir()
    with pytest.raises(nalora.NALoRAError, match="without config.json"):
        train(check({**settings, "model": str(empty)}))


def test_examples_of_the_test_set_are_counted(settings, capsys):
    few = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    result = train(check({**settings, "settings": few, "test_size": 100, "steps": 1}), console=Console(width=100))
    removed = result["dropped_also_asked"]
    assert removed > 0
    assert result["examples"] == settings["train_size"] - removed
    assert f"also in the test set: {removed} examples left out" in capsys.readouterr().out
    assert json.loads(RunFolder(settings["output"]).result.read_text())["dropped_also_asked"] == removed


def test_an_encoder_decoder_is_trained_and_evaluated(tmp_path):
    from nalora.evaluation.targets import Request, evaluate_target

    settings = {
        "model": tiny.saved_t5(tmp_path / "t5"), "task": "sst2", "data_dir": tiny.saved_sst2(tmp_path),
        "method": "na-lora", "device": "cpu", "output": str(tmp_path / "run"),
        "steps": 60, "batch_size": 4, "learning_rate": 3e-2, "log_every": 1,
    }  # fmt: skip
    train(check(settings))
    rows = metrics(settings["output"])
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.5
    summaries = evaluate_target(settings["output"], Request())
    assert summaries["adapted"]["target_loss"]["value"] < summaries["base"]["target_loss"]["value"]
    assert list(summaries["base"]["chance"].values()) == [0.5]


def test_a_clip_is_trained_and_evaluated(tmp_path):
    pytest.importorskip("sklearn")
    from tasks.test_clip import saved_clip

    from nalora.evaluation.targets import Request, evaluate_target

    settings = {
        "model": saved_clip(tmp_path / "clip"), "task": "digits", "method": "na-lora", "regimes": "derived",
        "device": "cpu", "output": str(tmp_path / "run"), "steps": 60, "batch_size": 64, "learning_rate": 1e-2,
        "log_every": 20,
    }  # fmt: skip
    train(check(settings))
    summaries = evaluate_target(settings["output"], Request())
    before, after = (summaries[who]["measures"]["accuracy"]["value"] for who in ("base", "adapted"))
    assert after > max(0.25, before + 0.1)


def test_held_out_images_are_not_trained_on_and_used_for_validation(tmp_path):
    pytest.importorskip("sklearn")
    from tasks.test_clip import saved_clip

    from nalora import tasks
    from nalora.evaluation.folder import Records
    from nalora.evaluation.targets import Request, evaluate_target
    from nalora.models import loading
    from nalora.runs.inputs import prepare
    from nalora.tasks.splits import hold_out

    settings = {
        "model": saved_clip(tmp_path / "clip"), "task": "digits", "device": "cpu", "output": str(tmp_path / "run"),
        "steps": 40, "batch_size": 64, "learning_rate": 1e-2, "validation_size": 90,
    }  # fmt: skip
    digits = tasks.get("digits")
    held = {each.id for each in hold_out(digits.train_examples(), 90)[1]}
    run = check(settings)
    material = prepare(digits, loading.load(run.settings.model_spec("clip")), run.settings)
    trained = {material.dataset[i].id for i in range(len(material.dataset))}
    assert trained == {each.id for each in digits.train_images()} - held
    assert train(run)["examples"] == 1500 - 90
    found = evaluate_target(settings["output"], Request(split="validation"))
    assert found["adapted"]["examples"] == 90
    assert found["adapted"]["target_loss"]["value"] < found["base"]["target_loss"]["value"] - 0.1
    for file in ("outputs.jsonl", "losses.jsonl"):
        (kept,) = (tmp_path / "run/evaluations/digits-validation").glob(f"adapted-*/{file}")
        assert Records(kept).rows.keys() == held
