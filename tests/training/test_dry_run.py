"""A dry run: what it predicts is what the run then does, and it leaves no trace."""

from __future__ import annotations

import json

import pytest
import tiny
import torch
from methods.small import TUNER_SETTINGS

from nalora import methods
from nalora.methods.peft_tuners import tuners
from nalora.models import loading
from nalora.runs.folder import RunFolder
from nalora.runs.inputs import prepare
from nalora.runs.settings import check
from nalora.training.batches import make_start
from nalora.training.dry_run import examine, measure
from nalora.training.run import train

# Starts from weights or gradients, so the count is LoRA's; that of these differs.
OF_ANOTHER_SIZE = {"gora", "peft/adamss", "peft/frod", "peft/shira"}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny.saved_llama(tmp_path_factory.mktemp("base"), hidden=64)


@pytest.fixture
def settings(base, tmp_path, monkeypatch):
    monkeypatch.setenv("NALORA_CACHE", str(tmp_path / "cache"))
    return {
        "model": base, "task": "gym/chain_sum", "train_size": 21, "test_size": 4, "batch_size": 4, "epochs": 2,
        "micro_batch_size": 2, "device": "cpu", "output": str(tmp_path / "run"), "save_every": 2, "snapshot_every": 6,
    }  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [
        {"method": "lora"},
        {"method": "full"},
        {"method": "na-lora", "on": "peft/gralora"},
        {"method": "na-lora", "on": "pissa"},
        {"method": "peft/hira"},
        {"method": "lora", "packing": True},
        {"method": "lora", "max_length": 120, "train_size": 60},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_what_is_predicted_is_what_happens(settings, tmp_path, options):
    run = check({**settings, **options})
    found = examine(run)
    assert found.problems == []
    assert not (tmp_path / "run").exists()
    result = train(run)
    assert found.steps == result["steps"]
    assert found.trainable == result["trainable_parameters"]
    assert found.inputs.summary() == {name: result[name] for name in found.inputs.summary()}
    assert len(found.lengths) == result["rows"]
    assert (result["dropped_too_long"] > 0) == ("max_length" in options)
    assert found.memory.activations
    assert (found.plan is not None) == (options["method"] == "na-lora")
    folder = RunFolder(tmp_path / "run")
    saved = folder.model if options["method"] == "full" else folder.adapter
    weights = max(file.stat().st_size for file in saved.glob("*.safetensors"))
    # Names and shapes in the files' headers, random states and logs come on top.
    assert sum(found.disk.values()) > weights
    assert found.disk[saved.name] == pytest.approx(weights, rel=0.15)
    per_checkpoint = sum(
        file.stat().st_size
        for file in folder.latest_checkpoint().iterdir()
        if file.name in ("optimizer.pt", "adapter_model.safetensors", "model.safetensors")
    )
    assert found.disk["checkpoints"] / 3 == pytest.approx(per_checkpoint, rel=0.4)


@pytest.mark.parametrize("name", [*methods.names(), *(f"peft/{tuner}" for tuner in sorted(tuners()))])
def test_trained_parameters_are_those_of_the_prepared_model(settings, tmp_path, name):
    options = TUNER_SETTINGS.get(name.removeprefix("peft/"), {}) if name.startswith("peft/") else {}
    options |= {"lora-scaled": {"gate_scale": 0.5}, "block-lora": {"blocks": 4}}.get(name, {})
    run = check({**settings, "method": name, **options})
    found = examine(run)
    assert found.problems == []
    loaded = loading.load(run.settings.model_spec())
    inputs = prepare(found.inputs.task, loaded, run.settings)
    start = make_start(
        run.settings, inputs.dataset, inputs.collator, torch.device("cpu"), tmp_path, lambda *progress: None
    )
    model = run.method.prepare(inputs.model.train(), inputs.adapter, start)
    if name in OF_ANOTHER_SIZE:
        assert found.as_lora
        assert found.trainable == examine(check({**settings, "method": "lora"})).trainable
        return
    assert found.trainable == run.method.trainable_parameters(model)
    if not found.as_lora:
        assert found.memory.trained == sum(4 * p.numel() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("start", ["pissa", "olora"])
def test_pefts_starts_from_the_weights_are_counted_as_lora(settings, start):
    run = check({**settings, "method": "peft/lora", "init_lora_weights": start})
    found = examine(run)
    assert found.problems == []
    assert found.as_lora
    assert found.trainable == train(run)["trainable_parameters"]


def test_what_a_method_refuses_is_a_problem(settings):
    found = examine(check({**settings, "method": "block-lora", "blocks": 3, "rank": 6}))
    assert ["layers whose two sizes blocks divides" in problem for problem in found.problems] == [True]


def test_problems_are_collected(settings, tmp_path):
    (tmp_path / "run").write_text("mine")
    found = examine(check({**settings, "report_to": "comet_ml", "liger": True}))
    assert len(found.problems) == 3
    for problem, part in zip(found.problems, ("comet", "a file", "liger"), strict=True):
        assert part in problem
    assert (tmp_path / "run").read_text() == "mine"
    (tmp_path / "run").unlink()
    found = examine(check({**settings, "max_length": 3}))
    assert ["none of at most 3 tokens" in problem for problem in found.problems] == [True]
    assert found.memory is None
    found = examine(check({**settings, "target_modules": ["gate_prj"]}))
    assert ["gate_prj" in problem for problem in found.problems] == [True]


def test_a_finished_run_and_one_to_resume(settings):
    run = check({**settings, "steps": 1})
    train(run)
    assert "a finished run" in examine(run).problems[0]
    assert examine(run, resume=True).problems == []


def test_a_full_disk_is_a_problem(settings, monkeypatch):
    import shutil

    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    assert "of free space" in examine(check(settings)).problems[0]


def test_measured_steps_leave_no_trace(settings, tmp_path):
    timing = measure(check(settings))
    assert timing.steps == 4
    assert 0 < timing.seconds < 60
    assert timing.peak > 2**26
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_the_memory_of_smollm2_is_within_the_stated_error(tmp_path):
    rows = tmp_path / "rows.jsonl"
    row = {"prompt": "word " * 100, "completion": " answer" * 27}
    rows.write_text("".join(json.dumps(row | {"prompt": f"{number} {row['prompt']}"}) + "\n" for number in range(64)))
    run = check({"model": "smollm2-135m", "task": str(rows), "batch_size": 8, "device": "cpu", "output": "none"})
    assert measure(run).peak == pytest.approx(examine(run).memory.process_on_cpu, rel=0.1)
