"""Experts: how PEFT stores their adapters, what is found in them, and what is refused with a way out."""

from __future__ import annotations

import peft
import pytest
import tiny
import tiny_experts
import torch
from small_models import causal_model
from torch.optim import SGD

import nalora
from nalora import NALoRAError
from nalora.control import experts as experts_module
from nalora.control.blocks import find_blocks


@pytest.mark.parametrize("architecture", tiny_experts.ARCHITECTURES)
def test_peft_stores_a_by_expert_and_the_experts_columns_of_b_next_to_each_other(architecture):
    model = tiny_experts.adapted(architecture)
    outer = model.base_model.model.model.layers[1].mlp.experts
    for layer in (outer, outer.base_layer):
        delta = layer.get_delta_weight("default")
        for expert in range(tiny_experts.EXPERTS):
            weight = tiny_experts._weight(layer, expert)
            own = layer.get_param()[expert] + delta[expert]
            assert torch.allclose(weight, own if layer.get_base_layer().is_transposed else own.T, atol=1e-12)
    assert outer.base_layer.lora_B["default"].weight.shape[0] == 2 * tiny_experts.WIDTH  # the channels are on B


@pytest.mark.parametrize("architecture", tiny_experts.ARCHITECTURES)
def test_what_is_found_in_experts(architecture):
    block = find_blocks(tiny_experts.adapted(architecture)).blocks[-1]
    assert block.name == "base_model.model.model.layers.1.mlp.experts"
    assert (block.width, block.experts.number) == (tiny_experts.WIDTH, tiny_experts.EXPERTS)
    halves = (slice(0, 20), slice(20, 40)) if architecture != "GptOss" else (slice(0, None, 2), slice(1, None, 2))
    assert (block.gate.rows, block.up.rows) == halves
    assert block.up_offset == (1.0 if architecture == "GptOss" else 0.0)
    expected = "quick_gelu≤2.5" if architecture == "GptOss" else "silu"
    assert block.activation.name == expected
    assert [projection.module.parameter_name for projection in block.projections.values()] == [
        "gate_up_proj",
        "gate_up_proj",
        "down_proj",
    ]


def test_the_plan_has_one_row_for_the_experts_of_all_layers():
    model = tiny_experts.adapted("Mixtral")
    text = str(nalora.attach(model, SGD(tiny.trainable(model), lr=0.1)).plan)
    assert text.count("experts") == 2
    assert "layers.0–1.mlp.experts" in text
    assert "gate gate_up_proj[0:20], up gate_up_proj[20:40], down down_proj, in each of 6 experts; silu" in text


def test_the_down_projections_alone_are_scaled_and_the_gates_alone_masked():
    for parameters, acts in ((["experts.down_proj"], (0.0, 1.0)), (["experts.gate_up_proj"], (1.0, 1.0))):
        model = tiny_experts.adapted("Mixtral", target_parameters=parameters)
        optimizer = SGD(tiny.trainable(model), lr=0.1)
        controller = nalora.attach(model, optimizer)
        tiny.sum_loss(model, tiny.tokens()).backward()
        optimizer.step()
        metrics = controller.metrics()
        assert (metrics["mask_acts"], metrics["scaling_acts"]) == acts
        assert (metrics["scale_down"] != 1) == ("experts.down_proj" in parameters)
        assert (metrics["mask_mean"] < 1) == ("experts.gate_up_proj" in parameters)


def test_experts_without_a_gated_product():
    """Nemotron-H's experts have relu² between two projections."""
    model = causal_model("nemotron_h", layers_block_type=["moe", "attention"], num_hidden_layers=2)
    config = peft.LoraConfig(r=2, target_modules=["o_proj"], target_parameters=["experts.up_proj", "experts.down_proj"])
    (block,) = find_blocks(peft.get_peft_model(model, config)).blocks
    assert block.up is None
    z = torch.tensor([-2.0, 0.5, 3.0])
    assert torch.allclose(block.activation.phi(z), z.relu().square())
    assert block.experts.order() is not None


def refused(model) -> str:
    with pytest.raises(NALoRAError) as raised:
        nalora.attach(model, SGD(tiny.trainable(model), lr=0.1))
    return str(raised.value)


def test_channels_on_a_are_refused():
    """The flag by which PEFT records that it exchanged inputs and outputs; without it B has the inputs' rows."""
    model = tiny_experts.adapted("Mixtral", target_parameters=["experts.gate_up_proj"])
    for layer in model.modules():
        if isinstance(layer, peft.tuners.lora.layer.ParamWrapper):
            layer._did_swap_in_out_features = False
    assert "3-D expert parameter MixtralExperts.gate_up_proj: PEFT puts the gate's channels on A" in refused(model)
    assert "use peft ≥ 0.21, or train it with plain LoRA" in refused(model)


def test_experts_of_another_class_are_refused(monkeypatch):
    model = tiny_experts.adapted("Mixtral")
    monkeypatch.setattr(experts_module, "DOWN", "w2")
    assert "MixtralExperts.down_proj: the class does not use transformers' experts interface" in refused(model)


def test_expert_parallelism_is_refused():
    model = tiny_experts.adapted("Mixtral")
    nalora.attach(model, SGD(tiny.trainable(model), lr=0.1))
    model.base_model.model.model.layers[0].mlp.experts.get_base_layer()._is_expert_parallel = True
    with pytest.raises(NALoRAError, match="distributed over processes"):
        model(input_ids=tiny.tokens())
