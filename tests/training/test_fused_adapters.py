"""Runs with fused adapters give the results of PEFT's layers, for every method."""

from __future__ import annotations

import io
import json

import fused_calls
import pytest
import tiny
import torch
from rich.console import Console
from safetensors.torch import load_file

import nalora
from nalora.runs.folder import RunFolder
from nalora.runs.settings import check
from nalora.training.dry_run import examine
from nalora.training.fused_layers import expected_layers
from nalora.training.run import train

# How many layers the tiny model's calls compute together: query, key and value; the output. FFNs are one function.
TOGETHER = {3, 1}
METHODS = [
    {"method": "lora"},
    {"method": "rslora"},
    {"method": "lora+"},
    {"method": "pissa"},
    {"method": "lora-pro"},
    {"method": "lora-ga", "gradient_batches": 2},
    {"method": "gora", "gradient_batches": 2},
    {"method": "na-lora"},
    {"method": "na-lora-utility", "apply_to": "update"},
    {"method": "lora", "gradient_checkpointing": True},
]


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    return {
        "model": tiny.saved_llama(folder / "base"), "task": "gym/chain_sum", "train_size": 40, "test_size": 4,
        "rank": 4, "steps": 4, "batch_size": 4, "learning_rate": 1e-3, "log_every": 1, "dtype": "float32",
        "device": "cpu",
    }  # fmt: skip


@pytest.fixture
def computed(monkeypatch):
    """How many layers each call of the fused function computed."""
    return fused_calls.counted(monkeypatch)


def trained(settings, folder, **changes):
    train(check({**settings, **changes, "output": str(folder)}))
    rows = [json.loads(line) for line in RunFolder(folder).metrics.read_text().splitlines()]
    return rows, load_file(RunFolder(folder).adapter / "adapter_model.safetensors")


@pytest.mark.parametrize("options", METHODS, ids=lambda each: "-".join(map(str, each.values())))
def test_the_same_run(settings, tmp_path, computed, monkeypatch, options):
    monkeypatch.setenv("NALORA_CACHE", str(tmp_path / "cache"))
    plain, weights = trained(settings, tmp_path / "plain", **options)
    assert not computed
    fused, fused_weights = trained(settings, tmp_path / "fused", **options, fused_adapters=True)
    assert set(computed) == TOGETHER
    for row, expected in zip(fused, plain, strict=True):
        assert row["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert row["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
    for name, expected in weights.items():
        torch.testing.assert_close(fused_weights[name], expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("options", [{"method": "dora"}, {"dropout": 0.1}, {"method": "adalora"}])
def test_layers_that_are_more_than_plain_lora_stay_as_they_are(settings, tmp_path, computed, options):
    plain, _ = trained(settings, tmp_path / "plain", **options)
    fused, _ = trained(settings, tmp_path / "fused", **options, fused_adapters=True)
    assert not computed
    assert [row["loss"] for row in fused] == [row["loss"] for row in plain]


NOTHING_FUSED = {
    "dropout": ({"dropout": 0.1}, "PEFT computes all 14 LoRA layers (lora_dropout in training)"),
    "dora": ({"method": "dora"}, "PEFT computes all 14 LoRA layers (Dora is not plain LoRA)"),
    "gpt2": ({"model": "gpt2"}, "PEFT computes all 8 LoRA layers (Conv1D below Linear is not supported)"),
    "full": ({"method": "full"}, "method: full has no LoRA layers of PEFT"),
}


@pytest.mark.parametrize("case", NOTHING_FUSED)
def test_a_run_and_its_dry_run_say_that_nothing_is_fused_and_why(settings, tmp_path, case):
    options, reason = NOTHING_FUSED[case]
    if "model" in options:
        options = {"model": tiny.saved_gpt2(tmp_path / "gpt2")}
    run = check({**settings, **options, "fused_adapters": True, "steps": 1, "output": str(tmp_path / "run")})
    assert examine(run).fused == [(f"Nothing is fused: {reason}", "fused_adapters: true")]
    screen = io.StringIO()
    train(run, console=Console(file=screen, width=200))
    assert f"Nothing is fused: {reason}\n" in screen.getvalue()
    assert "Fused layers" not in screen.getvalue()


@pytest.mark.parametrize(
    ("options", "device", "lines"),
    [
        ({}, "cuda", [("14 of 14 LoRA layers would be fused", "by default on a GPU")]),
        ({}, "cpu", []),
        ({"fused_adapters": False}, "cuda", []),
        ({"fused_adapters": True}, "cpu", [("14 of 14 LoRA layers would be fused", "fused_adapters: true")]),
        ({"method": "full"}, "cuda", []),
        (
            {"method": "na-lora", "kernels": "fused"},
            "cuda",
            [("14 of 14 LoRA layers would be fused", "kernels: fused")],
        ),
        (
            {"quantise": "8bit"},
            "cuda",
            [("Nothing is fused: PEFT computes all 14 LoRA layers (weights in 8 bits)", "by default on a GPU")],
        ),
    ],
)
def test_what_a_run_on_a_device_would_fuse(settings, options, device, lines):
    pytest.importorskip("triton")
    run = check({**settings, **options})
    model = tiny.llama() if options.get("method") != "full" else tiny.llama().unload()
    assert expected_layers(model, run, device) == lines


def test_layers_of_which_some_are_fused(settings):
    model = tiny.llama()
    for layer in model.get_base_model().model.layers:
        layer.mlp.down_proj.lora_dropout["default"] = torch.nn.Dropout(0.1)
    assert expected_layers(model, check({**settings, "fused_adapters": True}), "cpu") == [
        ("12 of 14 LoRA layers would be fused", "fused_adapters: true"),
        ("left to PEFT: 2 layers", "lora_dropout in training"),
    ]


def test_not_together_with_kernels_fused():
    run = {"model": "smollm2-135m", "task": "gym/chain_sum", "method": "na-lora", "kernels": "fused"}
    with pytest.raises(nalora.NALoRAError, match="remove one of the two"):
        check({**run, "fused_adapters": True})
