"""Runs with `base: fp8`: they train, resume exactly, and refuse what cannot be FP8."""

from __future__ import annotations

import io
import json

import pytest
import tiny
import torch
from rich.console import Console
from safetensors.torch import load_file
from stopped_runs import train_and_stop

import nalora
from nalora.kernels.fused.fp8_linear import FP8Linear
from nalora.runs.folder import RunFolder
from nalora.runs.settings import check
from nalora.training import fused_layers
from nalora.training.dry_run import examine
from nalora.training.run import train

pytest.importorskip("triton")
LAYERS = 2 * 7  # linear layers with an adapter in the two decoder layers


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny.saved_llama(tmp_path_factory.mktemp("base") / "base")


@pytest.fixture
def settings(base, tmp_path, monkeypatch):
    monkeypatch.setenv("NALORA_CACHE", str(tmp_path / "cache"))
    return {
        "model": base, "task": "gym/chain_sum", "train_size": 40, "test_size": 4, "rank": 4, "steps": 6,
        "batch_size": 4, "learning_rate": 1e-2, "log_every": 1, "dtype": "float32", "device": "cpu", "base": "fp8",
    }  # fmt: skip


def outcome(folder):
    rows = [json.loads(line) for line in RunFolder(folder).metrics.read_text().splitlines()]
    return [row["loss"] for row in rows], load_file(RunFolder(folder).adapter / "adapter_model.safetensors")


def trained(settings, folder, **changes):
    train(check({**settings, **changes, "output": str(folder)}))
    return outcome(folder)


@pytest.fixture
def layers_in_fp8(monkeypatch):
    """The number of FP8 layers of the model of each training, when it starts."""
    counts = []
    make = fused_layers.FusedModel

    def recorded(model, **options):
        layers = make(model, **options)
        counts.append(sum(isinstance(module, FP8Linear) for module in model.modules()))
        return layers

    monkeypatch.setattr(fused_layers, "FusedModel", recorded)
    return counts


@pytest.mark.parametrize(
    "options",
    [
        {"method": "lora"},
        {"method": "lora", "gradient_checkpointing": True},
        {"method": "lora", "micro_batch_size": 2},
        {"method": "lora", "gradient_checkpointing": True, "micro_batch_size": 1},
        {"method": "lora", "dtype": "bfloat16"},
        {"method": "dora"},
        {"method": "pissa"},
        {"method": "na-lora"},
        {"method": "na-lora", "apply_to": "update", "kernels": "fused"},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_a_run_learns_what_it_learns_on_the_plain_base(settings, tmp_path, layers_in_fp8, options, request):
    if "dtype" in options:
        request.getfixturevalue("ffns_layer_by_layer")
    if options.get("kernels") == "fused" and not torch.cuda.is_available():
        pytest.skip("kernels: fused needs a GPU")
    losses, weights = trained(settings, tmp_path / "fp8", **options)
    assert layers_in_fp8 == [LAYERS]
    plain_losses, plain_weights = trained(settings, tmp_path / "plain", **options, base=None)
    assert losses[-1] < losses[0] - 0.1
    assert losses == pytest.approx(plain_losses, rel=0.02)
    assert losses != plain_losses
    assert weights.keys() == plain_weights.keys()
    assert {weight.dtype for weight in weights.values()} == {weight.dtype for weight in plain_weights.values()}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_micro_batches_of_a_step_add_up(settings, tmp_path, checkpointing):
    """Tokens have scales of their own, so that a batch and its parts are rounded alike."""
    options = {"gradient_checkpointing": checkpointing}
    losses, _ = trained(settings, tmp_path / "whole", **options)
    parts, _ = trained(settings, tmp_path / "parts", micro_batch_size=2, **options)
    assert parts == pytest.approx(losses, rel=1e-3)


@pytest.mark.parametrize("options", [{"method": "lora"}, {"method": "na-lora", "apply_to": "update"}])
def test_a_stopped_run_resumes_bit_for_bit(settings, tmp_path, monkeypatch, layers_in_fp8, options):
    losses, weights = trained(settings, tmp_path / "whole", **options)
    run = check({**settings, **options, "output": str(tmp_path / "stopped")})
    train_and_stop(run, monkeypatch, after=3)
    saved = [load_file(file) for file in tmp_path.glob("stopped/**/checkpoint-3/*.safetensors")]
    assert saved
    assert not {w.dtype for tensors in saved for w in tensors.values()} & {torch.uint8, torch.float8_e4m3fn}
    train(run, resume=True)
    resumed_losses, resumed = outcome(tmp_path / "stopped")
    assert resumed_losses == losses
    assert all(torch.equal(resumed[name], weight) for name, weight in weights.items())
    assert layers_in_fp8 == [LAYERS] * 3


def test_resuming_on_another_base_is_refused(settings, tmp_path, monkeypatch):
    run = {**settings, "output": str(tmp_path / "run")}
    train_and_stop(check(run), monkeypatch, after=2)
    with pytest.raises(nalora.NALoRAError, match="base"):
        train(check({**run, "base": None}), resume=True)


# ---- what is printed -------------------------------------------------------------------------------------------------


def printed(settings, folder, **changes):
    screen = io.StringIO()
    train(check({**settings, **changes, "output": str(folder)}), console=Console(file=screen, width=200))
    return screen.getvalue()


def test_a_run_prints_what_is_fused_and_what_is_not(settings, tmp_path):
    text = printed(settings, tmp_path / "lora", steps=1)
    assert "Fused layers: 14 of 14 LoRA layers" in text
    assert "base in FP8: 14 linear layers" in text
    text = printed(settings, tmp_path / "dropout", steps=1, dropout=0.1)
    assert "Nothing is fused: PEFT computes all 14 LoRA layers (lora_dropout in training)\n" in text
    assert "base in FP8: 14 linear layers" in text
    assert "Fused layers: " not in text


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_a_quantised_base_is_refused_when_the_file_is_read(settings):
    with pytest.raises(nalora.NALoRAError, match="base: fp8 with quantise: 4bit; remove one of the two"):
        check({**settings, "quantise": "4bit"})
    with pytest.raises(nalora.NALoRAError, match="base"):
        check({**settings, "base": "fp4"})


def test_layers_of_peft_are_refused_when_the_file_is_read(settings):
    with pytest.raises(nalora.NALoRAError, match="fused_adapters: false with base: fp8, .*; remove one of the two"):
        check({**settings, "fused_adapters": False})
    run = check({**settings, "fused_adapters": True})
    assert check(run.to_dict()).settings == run.settings, "run.yaml has evaluate_quantised: true"
    check({**settings, "base": None, "fused_adapters": False})


@pytest.mark.parametrize(
    ("options", "message"),
    [({"method": "full"}, "method: full, which trains the base"), ({"dtype": "float16"}, "dtype: float16")],
    ids=["full", "float16"],
)
def test_settings_that_cannot_be_fp8_are_refused_before_the_model_is_loaded(settings, tmp_path, options, message):
    run = check({**settings, **options, "model": str(tmp_path / "missing"), "output": str(tmp_path / "run")})
    with pytest.raises(nalora.NALoRAError, match=f"base: fp8: found {message}"):
        train(run)
    assert not (tmp_path / "run").exists()


def test_layers_of_other_sizes_are_refused_by_name(settings, tmp_path):
    odd = tiny.saved_llama(tmp_path / "odd", hidden=40)
    run = check({**settings, "model": odd, "output": str(tmp_path / "run")})
    message = r"layers\.0\.self_attn\.q_proj\.base_layer: found a weight of shape \(40, 40\)"
    with pytest.raises(nalora.NALoRAError, match=message) as error:
        train(run)
    assert examine(run).problems == [str(error.value)]


def test_a_model_without_frozen_linear_layers_is_refused_by_train_and_dry_run(settings, tmp_path):
    run = check({**settings, "model": tiny.saved_gpt2(tmp_path / "gpt2"), "output": str(tmp_path / "run")})
    with pytest.raises(nalora.NALoRAError, match="found no frozen linear layer") as error:
        train(run)
    assert examine(run).problems == [str(error.value)]


def test_several_processes_are_refused_before_the_model_is_loaded(settings, monkeypatch):
    monkeypatch.setattr(fused_layers.processes, "count", lambda: 2)
    with pytest.raises(nalora.NALoRAError, match=r"base: fp8: found 2 processes; .* Fix: launch one"):
        fused_layers.refuse_unless_fused_layers_fit(check(settings), "cpu")
    plain = {**settings, "base": None}
    with pytest.raises(nalora.NALoRAError, match="fused_adapters: true: found 2 processes; expected one. Fix: leave"):
        fused_layers.refuse_unless_fused_layers_fit(check({**plain, "fused_adapters": True}), "cpu")
    fused_layers.refuse_unless_fused_layers_fit(check(plain), "cuda")


def test_a_dry_run_names_all_problems_of_the_settings(settings):
    found = examine(check({**settings, "method": "full", "dtype": "float16", "liger": True, "cuda_graphs": True}))
    assert [problem.partition(":")[0] for problem in found.problems] == ["liger", "cuda_graphs", "base"]
    assert "a run on cpu" in found.problems[1]
    assert "float16" in found.problems[1]
    assert "method: full" in found.problems[2]
    assert "dtype: float16" in found.problems[2]
    assert found.fused == []
    assert found.memory is not None, "the rest is examined, too"


def test_a_dry_run_says_what_is_fused_and_in_fp8(settings, tmp_path):
    output = {"output": str(tmp_path / "run")}
    assert examine(check({**settings, **output})).fused == [
        ("14 of 14 LoRA layers would be fused", "base: fp8"),
        ("base in FP8: 14 linear layers", "base: fp8"),
    ]
    nothing = "Nothing is fused: PEFT computes all 14 LoRA layers (lora_dropout in training)"
    assert examine(check({**settings, **output, "dropout": 0.1})).fused[0] == (nothing, "base: fp8")
    assert not (tmp_path / "run").exists()


def test_without_triton_the_package_is_named(settings, tmp_path, monkeypatch):
    monkeypatch.setattr(fused_layers, "has_triton", lambda: False)
    run = check({**settings, "output": str(tmp_path / "run")})
    with pytest.raises(nalora.NALoRAError, match="triton"):
        train(run)
    assert ["triton" in problem for problem in examine(run).problems] == [True]
