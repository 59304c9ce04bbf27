"""The norms of an update equal those of the computed product."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tiny
import torch
from safetensors.torch import load_file

from nalora.report.capacity import read_capacity, row_norms
from nalora.report.data import read_run
from report.run_folders import write_run


def saved(tmp_path, **lora):
    """Return a run whose adapter PEFT saved, and PEFT's update of every weight."""
    run = write_run(tmp_path, adapter=False)
    model = tiny.llama(torch.float32, **lora)
    model.save_pretrained(run / "adapter")
    deltas = {
        name.removeprefix("base_model.model."): module.get_delta_weight("default").detach()
        for name, module in model.named_modules()
        if hasattr(module, "get_delta_weight")
    }
    return run, deltas


@pytest.mark.parametrize(
    "lora",
    [
        {},
        {"use_rslora": True},
        {"rank_pattern": {"gate_proj": 6, "layers.1.mlp.up_proj": 2}, "alpha_pattern": {"gate_proj": 3}},
    ],
    ids=["plain", "rslora", "patterns"],
)
def test_norms_equal_those_of_pefts_update(tmp_path, lora):
    run, deltas = saved(tmp_path, **lora)
    capacity, said = read_capacity(read_run(run))
    assert said == ""
    assert set(capacity.modules) == set(deltas)
    for name, delta in deltas.items():
        assert capacity.modules[name] == pytest.approx(delta.norm().item(), rel=1e-5)
        np.testing.assert_allclose(capacity.rows[name], delta.norm(dim=1).numpy(), rtol=1e-4, atol=1e-7)


def test_a_block_has_its_projections(tmp_path):
    run, _ = saved(tmp_path)
    capacity, _ = read_capacity(read_run(run))
    assert set(capacity.of_block("base_model.model.model.layers.1.mlp")) == {"gate_proj", "up_proj", "down_proj"}


def test_row_norms_hold_in_half_precision_and_for_zero():
    B, A = torch.randn(5, 3).bfloat16(), torch.randn(3, 7).bfloat16()
    torch.testing.assert_close(row_norms(B, A), (B.double() @ A.double()).norm(dim=1))
    assert row_norms(torch.zeros(5, 3), A).tolist() == [0.0] * 5


def test_layers_are_in_the_order_of_the_model(tmp_path):
    capacity, _ = read_capacity(read_run(write_run(tmp_path, layers=11)))
    numbers = [int(name.split(".")[2]) for name in capacity.modules]
    assert numbers == sorted(numbers)


def test_a_run_without_adapter_has_a_reason(tmp_path):
    run = write_run(tmp_path, method="full", adapter=False)
    (run / "model").mkdir()
    capacity, said = read_capacity(read_run(run))
    assert capacity is None
    assert "trained the model itself" in said


def test_an_adapter_not_saved_yet_is_the_reason(tmp_path):
    capacity, said = read_capacity(read_run(write_run(tmp_path, adapter=False)))
    assert capacity is None
    assert "No adapter was saved yet" in said


def test_dora_has_a_remark(tmp_path):
    run, _ = saved(tmp_path, use_dora=True)
    capacity, said = read_capacity(read_run(run))
    assert capacity.modules
    assert "DoRA" in said


@pytest.mark.parametrize("damage", ["cut", "config", "half"])
def test_a_damaged_adapter_is_the_reason(tmp_path, damage):
    run = write_run(tmp_path)
    weights = run / "adapter" / "adapter_model.safetensors"
    if damage == "cut":
        weights.write_bytes(weights.read_bytes()[:100])
    elif damage == "config":
        (run / "adapter" / "adapter_config.json").write_text("{")
    else:
        from safetensors.torch import save_file

        save_file({k: v for k, v in load_file(weights).items() if "lora_B" in k}, weights)
    capacity, said = read_capacity(read_run(run))
    assert capacity is None
    assert "cannot be read" in said


def test_the_scale_is_read_from_the_configuration(tmp_path):
    run = write_run(tmp_path)
    before, _ = read_capacity(read_run(run))
    config = run / "adapter" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"lora_alpha": 24}))
    after, _ = read_capacity(read_run(run))
    for name, norm in before.modules.items():
        assert after.modules[name] == pytest.approx(3 * norm)
