"""The controls take away exactly what they say, and nothing else."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace

import pytest
import tiny
import torch
from safetensors.torch import load_file
from torch.optim import SGD

import nalora
from nalora import NALoRAConfig, methods
from nalora.runs.folder import RunFolder
from nalora.runs.settings import check
from nalora.training.run import train


def masks(steps=3, **config):
    """The mask of both blocks after each step, on the same batches."""
    model = tiny.llama(torch.float64)
    optimizer = SGD(tiny.trainable(model), lr=0.0)
    controller = nalora.attach(model, optimizer, NALoRAConfig(mask_ema=0.5, **config))
    found = []
    for step in range(steps):
        tiny.sum_loss(model, tiny.tokens(seed=step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(controller._window.groups[0].mask.clone())
    return found


def test_a_shuffled_mask_has_the_learned_ones_values_on_other_channels():
    learned, shuffled, again = masks(), masks(mask_channels="shuffled"), masks(mask_channels="shuffled")
    other = masks(mask_channels="shuffled", mask_seed=1)
    for one, two, three, four in zip(learned, shuffled, again, other, strict=True):
        torch.testing.assert_close(one.sort(-1).values, two.sort(-1).values, rtol=1e-12, atol=0)
        assert torch.equal(two, three)
        torch.testing.assert_close(one.sort(-1).values, four.sort(-1).values, rtol=1e-12, atol=0)
        assert not torch.allclose(two, four)
        assert not torch.allclose(one, two)
    # The exchange is the same at every step, and another one in each block.
    exchange = [
        [(row == value).nonzero().item() for value in changed]
        for row, changed in zip(learned[0], shuffled[0], strict=True)
    ]
    assert exchange[0] != exchange[1]
    for one, two in zip(learned, shuffled, strict=True):
        for block, order in enumerate(exchange):
            torch.testing.assert_close(one[block][order], two[block], rtol=1e-12, atol=0)


def test_a_frozen_mask_is_the_first_observations():
    frozen = masks(mask_channels="frozen")
    first = masks(steps=1, start="first")[0]
    assert all(torch.equal(each, first) for each in frozen)
    assert not torch.equal(masks()[2], first)
    assert frozen[0].mean() < 0.6, "the paper's keep ratio, not a mean with a start of ones"


def test_an_unknown_control_is_refused():
    with pytest.raises(nalora.NALoRAError, match="mask_channels"):
        NALoRAConfig(mask_channels="random")


@pytest.fixture
def settings(tmp_path):
    return {
        "model": tiny.saved_llama(tmp_path / "base"), "task": "gym/chain_sum",
        "settings": {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 3},
        "train_size": 32, "test_size": 8, "steps": 5, "batch_size": 8, "learning_rate": 1e-2, "log_every": 1,
        "device": "cpu", "max_length": 128, "rank": 4, "optimizer": "sgd",
    }  # fmt: skip


def trained(settings, tmp_path, name, **changes):
    output = tmp_path / name
    train(check({**settings, "output": str(output), **changes}))
    return load_file(RunFolder(output).adapter / "adapter_model.safetensors")


@pytest.mark.parametrize("apply_to", ["gradient", "update"])
def test_off_is_lora_to_the_last_bit(settings, tmp_path, apply_to):
    lora = trained(settings, tmp_path, "lora", method="lora")
    off = trained(settings, tmp_path, "off", method="na-lora-off", apply_to=apply_to)
    assert lora.keys() == off.keys()
    assert all(torch.equal(lora[name], off[name]) for name in lora)


def test_every_control_trains_another_adapter_than_the_others(settings, tmp_path):
    names = ("na-lora", "na-lora-random", "na-lora-frozen", "na-lora-mean", "na-lora-utility")
    adapters = {name: trained(settings, tmp_path, name, method=name, apply_to="update") for name in names}
    adapters["lora"] = trained(settings, tmp_path, "lora", method="lora")
    for one, other in itertools.combinations(adapters, 2):
        assert any(not torch.equal(adapters[one][name], adapters[other][name]) for name in adapters[one]), (one, other)


def test_the_random_mask_follows_the_runs_seed(monkeypatch):
    """Two seeds draw other channels: what differs is not the adapter's start alone."""
    configured = []
    monkeypatch.setattr(
        "nalora.integrations.trainer.attach_trainer", lambda _, config, kernels: configured.append(config)
    )
    for seed in (0, 1):
        trainer = SimpleNamespace(args=SimpleNamespace(seed=seed))
        methods.get("na-lora-random")().attach(trainer)
    assert configured[0].mask_seed != configured[1].mask_seed


def test_scaled_lora_steps_by_its_multiples(settings, tmp_path):
    """One step of SGD without clipping: each FFN adapter moves exactly its multiple of LoRA's way."""
    factors = {"gate_scale": 0.5, "up_scale": 0.25, "down_scale": 2.0, "mask_mean": 0.5}
    one_step = {**settings, "steps": 1, "max_norm": 0.0, "schedule": "constant", "warmup": 0.0, "weight_decay": 0.5}
    # B starts at zero and A gets no gradient in the first step: B is then the step itself, and A has only decayed.
    lora = trained(one_step, tmp_path, "lora", method="lora")
    scaled = trained(one_step, tmp_path, "scaled", method="lora-scaled", **factors)
    expected = {"gate_proj": 0.25, "up_proj": 0.25, "down_proj": 2.0}
    for name, theirs in lora.items():
        if "lora_B" in name:
            multiple = next((m for part, m in expected.items() if part in name), 1.0)
            torch.testing.assert_close(scaled[name], multiple * theirs)
            assert theirs.abs().sum() > 0
        elif "self_attn" in name:
            assert torch.equal(scaled[name], theirs)


def test_scaled_lora_reads_another_runs_means(settings, tmp_path):
    trained(settings, tmp_path, "na", method="na-lora", apply_to="update")
    rows = [json.loads(line) for line in (tmp_path / "na" / "metrics.jsonl").read_text().splitlines()]
    factors = methods.get("lora-scaled")(like=str(tmp_path / "na")).factors()
    ends = [0, *(row["step"] for row in rows)]
    weights = [row["learning_rate"] * (row["step"] - before) for row, before in zip(rows, ends, strict=False)]
    for ours, theirs in (("mask_mean", "mask_mean"), ("up_scale", "scale_up")):
        mean = sum(weight * row[f"nalora/{theirs}"] for weight, row in zip(weights, rows, strict=True)) / sum(weights)
        assert getattr(factors, ours) == pytest.approx(mean)
    trained(settings, tmp_path, "scaled", method="lora-scaled", like=str(tmp_path / "na"))


@pytest.mark.parametrize("off", ["mask", "scaling"])
def test_scaled_lora_takes_only_what_acted(settings, tmp_path, off):
    trained(settings, tmp_path, "na", method="na-lora", apply_to="update", start="first", **{off: False})
    factors = methods.get("lora-scaled")(like=str(tmp_path / "na")).factors()
    scaled = {name: getattr(factors, name) for name in ("gate_scale", "up_scale", "down_scale")}
    if off == "scaling":
        assert set(scaled.values()) == {1.0}
        assert factors.mask_mean < 1
    else:
        assert factors.mask_mean == 1
        assert all(value != 1 for value in scaled.values())


def test_scaled_lora_counts_steps_by_their_size(tmp_path):
    """The first row stands for one step of nearly nothing, the second for nine at the full rate."""
    rows = [
        {"step": step, "learning_rate": rate, "nalora/mask_mean": mask, "nalora/scaling_acts": 1.0}
        | {f"nalora/scale_{name}": 1.0 for name in ("gate", "up", "down")}
        for step, rate, mask in ((1, 1e-5, 0.9), (10, 1e-3, 0.3))
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    factors = methods.get("lora-scaled")(like=str(tmp_path)).factors()
    assert factors.mask_mean == pytest.approx((1e-5 * 0.9 + 9e-3 * 0.3) / (1e-5 + 9e-3))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "neither `like` nor a factor"),
        ({"like": "somewhere", "gate_scale": 0.5}, "both `like` and factors"),
        ({"gate_scale": 0.0}, "a positive number"),
    ],
)
def test_scaled_lora_needs_its_factors(settings, given, message):
    with pytest.raises(nalora.NALoRAError, match=message):
        check({**settings, "method": "lora-scaled", **given})


def test_scaled_lora_like_a_run_that_is_not_there(settings, tmp_path):
    with pytest.raises(nalora.NALoRAError, match="no metrics.jsonl"):
        trained(settings, tmp_path, "scaled", method="lora-scaled", like=str(tmp_path / "nothing"))
