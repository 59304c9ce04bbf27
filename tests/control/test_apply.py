"""Which rows of which parameters are multiplied, for fused, interleaved, transposed and several adapters."""

from __future__ import annotations

import pytest
import tiny
import torch
from architectures import architecture, dense_gpt_oss
from torch.optim import SGD

import nalora
from nalora import NALoRAConfig
from nalora.control.apply import BlockFactors, Control, multiply_gradients, multiply_updates, snapshot
from nalora.control.decision import BlockGroup, Decision


def one_step(model, inputs, controlled, apply_to="gradient", **settings):
    """Ratio of the first SGD update to plain LoRA's, and the controller, for two equal models."""
    start = tiny.adapter_state(model)
    optimizer = SGD(tiny.trainable(model), lr=0.1)
    config = NALoRAConfig(start="first", apply_to=apply_to, **settings)
    controller = nalora.attach(model, optimizer, config) if controlled else None
    output = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    (output if isinstance(output, torch.Tensor) else output.logits).square().sum().backward()
    optimizer.step()
    return {name: p - start[name] for name, p in tiny.adapter_state(model).items()}, controller


def ratios(build, inputs, **settings):
    plain, _ = one_step(build(), inputs, controlled=False)
    ours, controller = one_step(build(), inputs, controlled=True, **settings)
    return {name: ours[name] / plain[name] for name in plain if plain[name].any()}, controller


def state(controller, name):
    tensors = controller.state_dict()["tensors"]
    return tensors[f"{name}/mask"], tensors[f"{name}/scales"]


@pytest.mark.parametrize("apply_to", ["gradient", "update"])
@pytest.mark.parametrize(
    ("build", "inputs", "gate_rows", "up_rows"),
    [
        (
            lambda: tiny.with_lora(architecture("Phi3").double()),
            {"input_ids": tiny.tokens()},
            slice(0, 56),
            slice(56, 112),
        ),
        (
            lambda: tiny.with_lora(_seeded(dense_gpt_oss).double()),
            torch.randn(3, 5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(3)),
            slice(0, None, 2),
            slice(1, None, 2),
        ),
    ],
    ids=["halves", "interleaved"],
)
def test_fused_gate_up(apply_to, build, inputs, gate_rows, up_rows):
    ratio, controller = ratios(build, inputs, apply_to=apply_to, regimes="derived")
    for plan in controller.plan.blocks:
        mask, (gate, up, down) = state(controller, plan.block.name)
        b = ratio[f"{plan.block.gate.name}.lora_B.default.weight"]
        torch.testing.assert_close(b[gate_rows], (gate * mask)[:, None].expand_as(b[gate_rows]), rtol=1e-6, atol=0)
        torch.testing.assert_close(b[up_rows], up.expand_as(b[up_rows]), rtol=1e-6, atol=0)
        a = ratio[f"{plan.block.gate.name}.lora_A.default.weight"]
        torch.testing.assert_close(a, ((gate + up) / 2).expand_as(a), rtol=1e-6, atol=0)
        for factor in "AB":
            d = ratio[f"{plan.block.down.name}.lora_{factor}.default.weight"]
            torch.testing.assert_close(d, down.expand_as(d), rtol=1e-6, atol=0)


def _seeded(build):
    torch.manual_seed(0)
    return build()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["GPT-2", "OPT"])
def test_plain_ffn_masks_the_output_rows_whatever_the_layout(name):
    def build():
        return tiny.with_lora(architecture(name).double(), lora_dropout=0).eval().train()

    def without_dropout():
        model = build()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
            for attribute in ("dropout", "attn_pdrop"):
                if isinstance(getattr(module, attribute, None), float):
                    setattr(module, attribute, 0.0)
        return model

    ratio, controller = ratios(without_dropout, {"input_ids": tiny.tokens()})
    for plan in controller.plan.blocks:
        mask, _ = state(controller, plan.block.name)
        b = ratio[f"{plan.block.gate.name}.lora_B.default.weight"]
        torch.testing.assert_close(b, mask[:, None].expand_as(b), rtol=1e-6, atol=0)
        a = ratio[f"{plan.block.gate.name}.lora_A.default.weight"]
        torch.testing.assert_close(a, torch.ones_like(a), rtol=1e-9, atol=0)


def test_preserve_mean_keeps_the_mean_factor_at_one():
    ratio, controller = ratios(
        tiny.llama, {"input_ids": tiny.tokens()}, preserve_mean=True, scaling=False, keep_ratio=0.2
    )
    for plan in controller.plan.blocks:
        rows = ratio[f"{plan.block.gate.name}.lora_B.default.weight"].mean(1)
        assert rows.mean().item() == pytest.approx(1)
        assert rows.max() > 1.2


def test_several_adapters_only_the_active_ones_move():
    def build(active):
        model = tiny.llama()
        torch.manual_seed(5)
        model.add_adapter("second", model.peft_config["default"])
        for name, parameter in model.named_parameters():
            if "second" in name:
                parameter.data = parameter.data.double()
                if "lora_B" in name:
                    parameter.data = 0.05 * torch.randn_like(parameter)
        model.base_model.set_adapter(active)
        return model

    for active in (["second"], ["default", "second"]):
        ratio, controller = ratios(lambda active=active: build(active), {"input_ids": tiny.tokens()})
        mask, scales = state(controller, controller.plan.blocks[0].block.name)
        moved = {name.split(".")[-2] for name in ratio}
        assert moved == set(active)
        for adapter in active:
            b = ratio[f"{controller.plan.blocks[0].block.gate.name}.lora_B.{adapter}.weight"]
            torch.testing.assert_close(b, (scales[0] * mask)[:, None].expand_as(b), rtol=1e-6, atol=0)


def test_switching_the_adapter_during_training_moves_the_control_along():
    model = tiny.llama()
    model.add_adapter("second", model.peft_config["default"])
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.double()
            parameter.requires_grad_(True)
    optimizer = SGD([p for n, p in model.named_parameters() if "lora_" in n], lr=0.1)
    model.set_adapter("default")
    controller = nalora.attach(model, optimizer)
    for adapter in ("default", "second", "default"):
        model.set_adapter(adapter)
        before = tiny.adapter_state(model)
        tiny.sum_loss(model, tiny.tokens()).backward()
        optimizer.step()
        optimizer.zero_grad()
        moved = {n.split(".")[-2] for n, p in tiny.adapter_state(model).items() if not torch.equal(p, before[n])}
        assert moved == {adapter}
    assert controller._window.groups[0].updates.tolist() == [3, 3]


def test_low_precision_parameters_are_moved_in_float32():
    parameter = torch.nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.bfloat16))
    old = torch.tensor([0.5, 1.0], dtype=torch.bfloat16)
    multiply_updates([Control([parameter], torch.tensor([[0.5]]))], {parameter: old})
    assert parameter.tolist() == [0.75, 1.5]
    parameter.grad = torch.tensor([2.0, 4.0], dtype=torch.bfloat16)
    multiply_gradients([Control([parameter], torch.tensor([[0.5, 0.25]]))])
    assert parameter.grad.tolist() == [1.0, 1.0]


def test_a_factor_of_one_is_exact():
    new, old = torch.randn(1000), torch.randn(1000)
    parameter = torch.nn.Parameter(new.clone())
    multiply_updates([Control([parameter], torch.ones(1, 1000))], {parameter: old})
    assert torch.equal(parameter.detach(), new)


def test_updates_of_bf16_parameters_are_multiplied_in_float32():
    """A factor of 1.0625 or 1.07 is the same in bf16's eight bits, and so is a sum of two numbers near each other."""
    drawn = torch.Generator().manual_seed(0)
    old, new = (torch.randn(64, 64, generator=drawn).bfloat16() for _ in range(2))
    factors = 0.5 + torch.rand(1, 64, 1, generator=drawn)
    parameter = torch.nn.Parameter(old.clone())
    control = Control([parameter], factors)
    before = snapshot([control])
    parameter.data.copy_(new)
    multiply_updates([control], before)
    expected = old.double() + factors[0].double() * (new.double() - old.double())
    assert parameter.dtype == torch.bfloat16
    wrong = parameter.detach() != expected.bfloat16()
    assert wrong.float().mean() < 1e-3, "at most where float32 rounds another way just between two bf16 numbers"


def test_a_bf16_adapter_in_update_space_moves_by_its_factors():
    def after_a_step(controlled):
        model = tiny.llama(dtype=torch.bfloat16)
        optimizer = SGD(tiny.trainable(model), lr=0.1)
        config = NALoRAConfig(start="first", apply_to="update")
        controller = nalora.attach(model, optimizer, config) if controlled else None
        model(tiny.tokens()).logits.square().sum().backward()
        optimizer.step()
        return tiny.adapter_state(model), controller

    start = tiny.adapter_state(tiny.llama(dtype=torch.bfloat16))
    plain, _ = after_a_step(controlled=False)
    ours, controller = after_a_step(controlled=True)
    for plan in controller.plan.blocks:
        mask, (gate, _, down) = state(controller, plan.block.name)
        for name, factor in (
            (f"{plan.block.down.name}.lora_B.default.weight", down),
            (f"{plan.block.gate.name}.lora_B.default.weight", (gate * mask)[:, None]),
        ):
            old, new = start[name].double(), plain[name].double()
            assert ours[name].dtype == torch.bfloat16
            assert (ours[name] != (old + factor.double() * (new - old)).bfloat16()).float().mean() < 0.01
            assert not torch.equal(ours[name], plain[name])


def test_each_parameter_keeps_its_own_factor_where_another_one_does_not_learn():
    still, moving = (torch.nn.Parameter(torch.ones(2, 2)) for _ in range(2))
    control = Control([still, moving], torch.tensor([2.0, 3.0])[:, None, None])
    moving.grad = torch.ones(2, 2)
    multiply_gradients([control])
    assert still.grad is None
    assert moving.grad.tolist() == [[3.0, 3.0]] * 2
    still.requires_grad_(False)
    before = snapshot([control])
    assert [*before] == [moving]
    moving.data += 1
    multiply_updates([control], before)
    assert still.tolist() == [[1.0, 1.0]] * 2
    assert moving.tolist() == [[4.0, 4.0]] * 2


def test_a_group_whose_mask_is_off_multiplies_all_rows_by_the_gates_scale():
    decided = Decision(
        mask=torch.tensor([[0.5, 0.25]]),
        scales=torch.tensor([[1.5, 1.25, 0.75]]),
        valid=torch.tensor([True]),
        shares=torch.zeros(1, 3),
        score=torch.zeros(1),
    )

    def rows(**acts):
        group = BlockGroup(["block"], 2, torch.float32, torch.device("cpu"), **acts)
        return BlockFactors.of(group, decided, preserve_mean=False).rows.tolist()

    assert rows(mask_acts=False, scaling_acts=True) == [[1.5, 1.5]]
    assert rows(mask_acts=True, scaling_acts=False) == [[0.5, 0.25]]
    assert rows(mask_acts=False, scaling_acts=False) == [[1.0, 1.0]]


def test_parameters_that_do_not_learn_do_not_keep_later_ones_from_moving():
    frozen, moving = torch.nn.Parameter(torch.ones(2), requires_grad=False), torch.nn.Parameter(torch.ones(3))
    controls = [Control([frozen], torch.tensor([[0.5]])), Control([moving], torch.tensor([[0.5]]))]
    before = snapshot(controls)
    moving.data += 1
    multiply_updates(controls, before)
    assert (frozen.tolist(), moving.tolist()) == ([1.0] * 2, [1.5] * 3)


def test_float64_parameters_take_float32_factors():
    parameter = torch.nn.Parameter(torch.tensor([1.0, 3.0], dtype=torch.float64))
    old = torch.tensor([0.0, 1.0], dtype=torch.float64)
    multiply_updates([Control([parameter], torch.tensor([[0.5]]))], {parameter: old})
    assert parameter.tolist() == [0.5, 2.0]
