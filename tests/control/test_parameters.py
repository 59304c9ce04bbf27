"""Which parameters a block's controls act on, and with which factors."""

from __future__ import annotations

import peft
import pytest
import tiny
import torch

from nalora import NALoRAConfig
from nalora.control.blocks import find_blocks
from nalora.control.parameters import controlled, controlled_parameters
from nalora.control.peft_layers import active_adapters
from nalora.control.plan import make_plan
from nalora.control.window import StepWindow


@pytest.fixture
def model():
    return tiny.llama()


def names(model, parameters):
    by_id = {id(parameter): name for name, parameter in model.named_parameters()}
    return sorted(by_id[id(parameter)].partition(".mlp.")[2] for parameter in parameters)


def test_mask_and_scales_act_on_all_adapters_of_the_ffn_and_on_nothing_else(model):
    parameters = controlled_parameters(make_plan(find_blocks(model), NALoRAConfig()))
    factors = [f"{p}_proj.lora_{f}.default.weight" for p in ("down", "gate", "up") for f in "AB"]
    assert names(model, parameters) == sorted(2 * factors), "two layers"


def test_without_scaling_only_the_gates_b_is_left(model):
    parameters = controlled_parameters(make_plan(find_blocks(model), NALoRAConfig(scaling=False)))
    assert names(model, parameters) == 2 * ["gate_proj.lora_B.default.weight"]


def test_roles_of_a_block_with_separate_projections(model):
    block = make_plan(find_blocks(model), NALoRAConfig()).blocks[0]
    assert [role.factor for _, role in controlled(block)] == ["gate", "rows", "up", "up", "down", "down"]


def test_only_active_adapters_are_found(model):
    model.add_adapter("second", peft.LoraConfig(r=2, target_modules="all-linear"))
    gate = model.base_model.model.model.layers[0].mlp.gate_proj
    assert [adapter.name for adapter in active_adapters(gate)] == ["default"]
    model.set_adapter("second")
    assert [adapter.name for adapter in active_adapters(gate)] == ["second"]
    assert list(active_adapters(torch.nn.Linear(2, 2))) == []


def test_controls_give_each_parameter_its_own_factor(model):
    """The factors of two blocks differ, so that a batch with a wrong index would show."""
    plan = make_plan(find_blocks(model), NALoRAConfig())
    window = StepWindow(plan.blocks)
    assert window.parameters.refresh()
    assert not window.parameters.refresh(), "nothing has changed"
    (group,) = window.groups
    generator = torch.Generator().manual_seed(0)
    decision = group.decide(NALoRAConfig())
    decision = decision._replace(
        mask=torch.rand(2, group.mask.shape[1], generator=generator, dtype=torch.float64),
        scales=torch.rand(2, 3, generator=generator, dtype=torch.float64),
    )
    factor_of = {}
    for control in window.parameters.controls([decision], preserve_mean=False):
        for parameter, factor in zip(control.parameters, control.factors, strict=True):
            factor_of[id(parameter)] = factor
    for index, layer in enumerate(model.base_model.model.model.layers):
        gate, up, down = decision.scales[index]
        for projection, expected in (("gate_proj", gate), ("up_proj", up), ("down_proj", down)):
            (adapter,) = active_adapters(getattr(layer.mlp, projection))
            torch.testing.assert_close(factor_of[id(adapter.a)].squeeze(), expected)
            rows = gate * decision.mask[index] if projection == "gate_proj" else expected
            torch.testing.assert_close(factor_of[id(adapter.b)].squeeze(), rows)


def test_replaced_parameters_are_noticed(model):
    window = StepWindow(make_plan(find_blocks(model), NALoRAConfig()).blocks)
    window.parameters.refresh()
    gate = model.base_model.model.model.layers[0].mlp.gate_proj
    assert not window.parameters.were_replaced(gate)
    version = window.parameters.version(gate)
    with torch.no_grad():
        gate.lora_B["default"].weight.mul_(2)
    assert window.parameters.version(gate) > version
    gate.lora_B["default"].weight = torch.nn.Parameter(gate.lora_B["default"].weight.detach().clone())
    assert window.parameters.were_replaced(gate)
    assert window.parameters.refresh()
