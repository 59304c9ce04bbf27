"""Replayed passes: the run that they make is the eager run, for every method."""

from __future__ import annotations

import json

import peft
import pytest
import tiny
import torch

import nalora
from nalora import tasks
from nalora.evaluation.generation import AnswerGenerator
from nalora.models.loading import ModelSpec, load
from nalora.runs.encoding import Collator, Encoder
from nalora.runs.folder import RunFolder
from nalora.runs.settings import check
from nalora.studies.job import release_memory
from nalora.training.run import train

METHODS = [
    {"method": "lora"},
    {"method": "full", "learning_rate": 1e-4},
    {"method": "rslora"},
    {"method": "dora"},
    {"method": "pissa"},
    {"method": "lora+"},
    {"method": "adalora"},
    {"method": "lora-ga", "gradient_batches": 2},
    {"method": "lora-pro"},
    {"method": "gora", "gradient_batches": 2},
    {"method": "na-lora"},
    {"method": "na-lora", "apply_to": "update"},
    {"method": "na-lora-utility", "apply_to": "update"},
    {"method": "na-lora-random", "apply_to": "update"},
]


@pytest.fixture
def settings(tmp_path, monkeypatch):
    monkeypatch.setenv("NALORA_CACHE", str(tmp_path / "cache"))
    return {
        "model": tiny.saved_llama(tmp_path / "base"), "task": "gym/chain_sum", "train_size": 80, "test_size": 4,
        "settings": {"min_terms": 2, "max_terms": 9, "min_digits": 1, "max_digits": 6}, "rank": 4, "steps": 18,
        "batch_size": 4, "learning_rate": 1e-3, "log_every": 1, "batches": "like-length",
    }  # fmt: skip


def rows(folder):
    return [json.loads(line) for line in RunFolder(folder).metrics.read_text().splitlines()]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("options", METHODS, ids=lambda each: "-".join(map(str, each.values())))
def test_the_same_run(settings, tmp_path, options):
    found = {}
    for graphs in (False, True):
        output = str(tmp_path / str(graphs))
        train(check({**settings, **options, "dtype": "float32", "cuda_graphs": graphs, "output": output}))
        found[graphs] = rows(output)
    for eager, replayed in zip(found[False], found[True], strict=True):
        assert replayed["loss"] == pytest.approx(eager["loss"], rel=1e-3)
        assert replayed["grad_norm"] == pytest.approx(eager["grad_norm"], rel=2e-2)
        for name in ("nalora/mask_mean", "nalora/scale_gate", "nalora/p_sup"):
            assert replayed.get(name) == pytest.approx(eager.get(name), rel=1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("method", ["lora", "na-lora-utility"])
def test_fused_adapters_can_be_captured(settings, tmp_path, method):
    found = {}
    for fused in (False, True):
        output = str(tmp_path / str(fused))
        run = {**settings, "method": method, "dtype": "float32", "cuda_graphs": True, "fused_adapters": fused}
        train(check({**run, "output": output}))
        found[fused] = rows(output)
    for plain, fused in zip(found[False], found[True], strict=True):
        assert fused["loss"] == pytest.approx(plain["loss"], rel=1e-3)
        assert fused["grad_norm"] == pytest.approx(plain["grad_norm"], rel=2e-2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_liger_s_layers_can_be_captured(settings, tmp_path):
    pytest.importorskip("liger_kernel")
    train(check({**settings, "method": "na-lora", "liger": True, "cuda_graphs": True, "output": str(tmp_path / "run")}))
    losses = [row["loss"] for row in rows(tmp_path / "run")]
    assert sum(losses[-3:]) < sum(losses[:3])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_after_a_replayed_run_the_same_process_writes_what_generate_writes(settings, tmp_path):
    """Nothing of training is left behind: no graph's memory, none of Liger's layers."""
    pytest.importorskip("liger_kernel")
    folder = RunFolder(tmp_path / "run")
    for seed in (0, 1):
        output = str(tmp_path / "run") if seed else str(tmp_path / "before")
        train(check({**settings, "liger": True, "cuda_graphs": True, "seed": seed, "output": output}))
    release_memory()
    base = load(ModelSpec(settings["model"], dtype="float32"))
    model = peft.PeftModel.from_pretrained(base.model, folder.adapter).eval()
    task = tasks.get("gym/chain_sum", train_size=4, test_size=70)
    writer = AnswerGenerator(model, Encoder(base.processor), max_new_tokens=48, batch_tokens=16_384)
    assert writer.static
    replayed = [writer.answer(batch) for batch in writer.batches(task.test_examples())]
    writer.static = False
    assert replayed == [writer.answer(batch) for batch in writer.batches(task.test_examples())]


def test_batches_come_in_few_lengths():
    rows = [{"input_ids": [1] * length, "labels": [1] * length} for length in (3, 66)]
    batch = Collator(0, multiple=64)(rows)
    assert {tuple(each.shape) for each in batch.values()} == {(2, 128)}
    assert batch["attention_mask"].sum(1).tolist() == [3, 66]
    assert (batch["labels"] != -100).sum(1).tolist() == [3, 66]


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"device": "cpu"}, "a run on cpu")],
)
def test_what_cannot_be_replayed_is_refused(settings, tmp_path, changes, message):
    with pytest.raises(nalora.NALoRAError, match=message):
        train(check({**settings, "cuda_graphs": True, **changes, "output": str(tmp_path / "run")}))


@pytest.mark.parametrize(
    ("changes", "accumulated", "processes", "dtype", "message"),
    [
        ({}, 2, 1, "bfloat16", "2 passes in a step"),
        ({}, 1, 2, "bfloat16", "2 processes"),
        ({}, 1, 1, "float16", "float16"),
        ({"packing": True}, 1, 1, "bfloat16", "packing"),
        ({"gradient_checkpointing": True}, 1, 1, "bfloat16", "gradient checkpointing"),
    ],
)
def test_obstacles_are_named(changes, accumulated, processes, dtype, message):
    from nalora.training.accelerations import refuse_unless_graphs_fit

    run = check({"model": "smollm2-135m", "task": "gym/chain_sum", "cuda_graphs": True, **changes})
    with pytest.raises(nalora.NALoRAError, match=message):
        refuse_unless_graphs_fit(run.settings, "cuda", dtype, accumulated, processes)
