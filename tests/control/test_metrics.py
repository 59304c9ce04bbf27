"""Metrics report what is applied: neutral where a control is off, with the followed value under its own name."""

from __future__ import annotations

import pytest
import tiny
import torch
import transformers
from torch import nn
from torch.optim import SGD

import nalora
from nalora.config import NALoRAConfig
from nalora.control.metrics import FOLLOWED, NEUTRAL


def after_steps(model, config, steps=3):
    optimizer = SGD(tiny.trainable(model), lr=0.01)
    controller = nalora.attach(model, optimizer, config)
    for seed in range(steps):
        tiny.sum_loss(model, tiny.tokens(seed=seed)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return controller


def bert_like() -> nn.Module:
    """A GPT-2: its MLP has GELU and no up projection."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=tiny.VOCABULARY, n_positions=64, n_embd=32, n_layer=2, n_head=2)
    return tiny.with_lora(transformers.GPT2LMHeadModel(config).double(), ["c_fc", "c_proj"], fan_in_fan_out=True)


def names_ending(metrics, name):
    return {key: value for key, value in metrics.items() if key.endswith(f"/{name}")}


def test_all_on_nothing_is_only_followed():
    metrics = after_steps(tiny.llama(), NALoRAConfig()).metrics(per_block=True)
    assert not [name for name in metrics if "followed" in name]
    assert metrics["mask_acts"] == metrics["scaling_acts"] == 1
    assert metrics["mask_mean"] < 1
    assert metrics["scale_gate"] != 1


@pytest.mark.parametrize(
    ("config", "off"),
    [
        (NALoRAConfig(start="first", scaling=False), {"scale_gate", "scale_up", "scale_down"}),
        (NALoRAConfig(start="first", mask=False), {"mask_mean", "kept_share", "stability"}),
        (NALoRAConfig(start="first", mask=False, scaling=False), set(NEUTRAL)),
        (NALoRAConfig(start="first", preserve_mean=True), {"mask_mean"}),
    ],
)
def test_a_control_that_is_off_is_neutral_and_its_value_followed(config, off):
    controller = after_steps(tiny.llama(), config)
    on = after_steps(tiny.llama(), NALoRAConfig(start="first"))
    metrics, expected = controller.metrics(per_block=True), on.metrics(per_block=True)
    assert {name for name in NEUTRAL if FOLLOWED[name] in metrics} == off
    for prefix in ("", *(f"{each.block.name}/" for each in controller.plan.blocks)):
        for name, neutral in NEUTRAL.items():
            if name in off:
                assert metrics[prefix + name] == neutral
                assert metrics[prefix + FOLLOWED[name]] != neutral
                # Followed as if it acted; only what the steps did to the weights differs.
                assert metrics[prefix + FOLLOWED[name]] == pytest.approx(expected[prefix + name], rel=0.1)
            else:
                assert metrics[prefix + name] == pytest.approx(expected[prefix + name], rel=0.1)
    assert metrics["mask_acts"] == float(config.mask)
    assert metrics["scaling_acts"] == float(config.scaling)


def test_the_reported_factors_are_those_that_multiply_the_gradients():
    """The mean of what every gate's B is multiplied by, with the mean preserved, is what the metrics say: 1."""
    model = tiny.llama()
    optimizer = SGD(tiny.trainable(model), lr=0.01)
    controller = nalora.attach(model, optimizer, NALoRAConfig(preserve_mean=True, scaling=False, start="first"))
    tiny.sum_loss(model, tiny.tokens()).backward()
    gate = next(p for n, p in model.named_parameters() if "layers.0.mlp.gate_proj.lora_B" in n)
    up = next(p for n, p in model.named_parameters() if "layers.0.mlp.up_proj.lora_B" in n)
    before, up_before = gate.grad.clone(), up.grad.clone()
    controller.apply()
    factors = (gate.grad / before).nanmedian(dim=1).values
    optimizer.step()
    metrics = controller.metrics()
    assert metrics["mask_mean"] == pytest.approx(factors.mean().item(), rel=1e-9) == 1
    assert metrics["scale_up"] == pytest.approx((up.grad / up_before).nanmedian().item()) == 1
    assert metrics["followed_mask_mean"] < 0.9


def test_gelu_under_the_papers_regimes_has_no_scales_but_follows_them():
    paper = after_steps(bert_like(), NALoRAConfig()).metrics(per_block=True)
    derived = after_steps(bert_like(), NALoRAConfig(regimes="derived")).metrics(per_block=True)
    assert paper["scaling_acts"] == 0
    assert [paper[f"scale_{name}"] for name in ("gate", "up", "down")] == [1, 1, 1]
    assert paper["followed_scale_gate"] == pytest.approx(derived["scale_gate"], rel=0.05) != 1
    assert paper["mask_mean"] < 1
    # There is no up projection that could be scaled, also where the others are.
    assert derived["scale_gate"] != 1
    assert derived["scale_up"] == 1
    assert "followed_scale_up" in derived
    assert "followed_scale_gate" not in derived


def test_a_projection_without_an_adapter_is_not_scaled():
    model = tiny.llama(target_modules=["gate_proj", "down_proj"])
    metrics = after_steps(model, NALoRAConfig()).metrics()
    assert metrics["scale_up"] == 1
    assert metrics["followed_scale_up"] != 1
    assert metrics["scale_down"] != 1


def test_blocks_with_and_without_scaling():
    """One block of SiLU, one of GELU: each reports its own, the mean is over the factors that are applied."""
    model = tiny.llama()
    model.base_model.model.model.layers[1].mlp.act_fn = nn.GELU()
    controller = after_steps(model, NALoRAConfig())
    metrics = controller.metrics(per_block=True)
    silu, gelu = (
        names_ending(metrics, "scale_gate")[f"{each.block.name}/scale_gate"] for each in controller.plan.blocks
    )
    assert silu != 1
    assert gelu == 1
    assert metrics["scale_gate"] == pytest.approx((silu + 1) / 2)
    assert metrics["scaling_acts"] == 0.5
    followed = names_ending(metrics, "followed_scale_gate")
    assert list(followed) == [f"{controller.plan.blocks[1].block.name}/followed_scale_gate"]
    assert metrics["followed_scale_gate"] == next(iter(followed.values()))
