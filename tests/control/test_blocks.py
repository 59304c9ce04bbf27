"""FFN blocks are found by what a model computes: a table of architectures, partial adapters, refusals."""

from __future__ import annotations

import re

import peft
import pytest
import tiny
import torch
from architectures import architecture, dense_gpt_oss
from installed import EXPERTS
from torch import nn

import nalora
from nalora import NALoRAConfig, NALoRAError
from nalora.control.blocks import find_blocks
from nalora.control.plan import make_plan

GATED = ("gate_proj", "up_proj", "down_proj")

# name: (blocks, activation, gate, its rows, up, its rows, down)
HALVES = (slice(0, 56), slice(56, 112))
ALL = slice(None)
# transformers has renamed them.
VIT = (
    ("fc1", "fc2")
    if any("fc1" in name for name, _ in architecture("ViT").named_modules())
    else ("intermediate.dense", "output.dense")
)
ARCHITECTURES = {
    **{
        name: (2, "silu", "gate_proj", ALL, "up_proj", ALL, "down_proj")
        for name in ("Llama", "Mistral", "Qwen2", "Qwen3", "SmolLM3", "Olmo2", "Qwen2-MoE")
    },
    **{name: (2, "gelu_tanh", "gate_proj", ALL, "up_proj", ALL, "down_proj") for name in ("Gemma2", "Gemma3")},
    **{
        name: (2, "silu", "gate_up_proj", HALVES[0], "gate_up_proj", HALVES[1], "down_proj")
        for name in ("Phi3", "Glm4")
    },
    # ModernBERT calls the straight half "gate": the bent one is what counts.
    "ModernBERT": (2, "gelu", "Wi", HALVES[0], "Wi", HALVES[1], "Wo"),
    "T5 v1.0": (4, "relu", "wi", ALL, None, None, "wo"),
    "T5 v1.1": (4, "gelu_tanh", "wi_0", ALL, "wi_1", ALL, "wo"),
    "CLIP": (4, "quick_gelu", "fc1", ALL, None, None, "fc2"),
    "ViT": (2, "gelu", VIT[0], ALL, None, None, VIT[1]),
    "BERT": (2, "gelu", "intermediate.dense", ALL, None, None, "output.dense"),
    "GPT-2": (2, "gelu_tanh", "c_fc", ALL, None, None, "mlp.c_proj"),
    "OPT": (2, "relu", "fc1", ALL, None, None, "fc2"),
}


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.filterwarnings("ignore")
def test_every_architecture(name, device):
    count, activation, gate, gate_rows, up, up_rows, down = ARCHITECTURES[name]
    with torch.device(device):
        model = architecture(name)
    model = peft.get_peft_model(
        model, peft.LoraConfig(r=2, target_modules="all-linear"), low_cpu_mem_usage=device == "meta"
    )
    found = find_blocks(model)
    assert len(found.blocks) == count
    for block in found.blocks:
        assert (block.activation.name, block.width, block.up_offset) == (activation, 56, 0)
        assert block.gate.name.endswith(f".{gate}")
        assert block.gate.rows == gate_rows
        assert block.down.name.endswith(f".{down}")
        if up is None:
            assert block.up is None
        else:
            assert block.up.name.endswith(f".{up}")
            assert block.up.rows == up_rows
    claimed = {p.name for block in found.blocks for p in block.projections.values()}
    assert claimed.isdisjoint(found.others)
    assert not any(name.endswith(("shared_expert_gate", ".gate")) for name in claimed)


def test_interleaved_gate_up_of_gpt_oss():
    blocks = find_blocks(tiny.with_lora(dense_gpt_oss())).blocks
    assert len(blocks) == 2
    for block in blocks:
        assert block.gate.rows == slice(0, None, 2)
        assert block.up.rows == slice(1, None, 2)
        assert block.up_offset == 1.0
        assert block.activation.name.startswith("quick_gelu")
        z = torch.tensor([-3.0, 0.5, 6.9, 7.1, 20.0])
        clamped = z.clamp(max=7.0)
        torch.testing.assert_close(block.activation.phi(z), clamped * torch.sigmoid(1.702 * clamped))
        assert torch.equal(block.activation.derivative(z)[-2:], torch.zeros(2))


class NeverHeardOf(nn.Module):
    """A model of the user's own: odd names, an activation of its own, a factor, norms and a residual around it."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.kernels = nn.ModuleDict({"frobnicate": nn.Linear(16, 40), "widget": nn.Linear(16, 40)})
        self.squash = nn.Linear(40, 16, bias=False)

    def forward(self, signal):
        x = self.norm(signal)
        bent = self.kernels["widget"](x)
        bent = bent * torch.sigmoid(3 * bent)
        return signal + self.squash(0.5 * self.kernels["frobnicate"](x) * bent)


def test_a_model_that_is_unknown():
    model = tiny.with_lora(nn.Sequential(NeverHeardOf(), NeverHeardOf()), lora_b=0.1)
    blocks = find_blocks(model).blocks
    assert [block.gate.name.rpartition(".")[2] for block in blocks] == ["widget", "widget"]
    assert [block.up.name.rpartition(".")[2] for block in blocks] == ["frobnicate", "frobnicate"]
    # φ(z) = z σ(3z)/2 has SiLU's characteristic points divided by 3.
    assert blocks[0].activation.characteristic_points.upper == pytest.approx(1.278464543 / 3, abs=1e-4)
    optimizer = torch.optim.SGD(tiny.trainable(model), lr=0.1)
    controller = nalora.attach(model, optimizer)
    model(torch.randn(2, 5, 16)).square().sum().backward()
    optimizer.step()
    metrics = controller.metrics()
    assert metrics["p_res"] < 1
    assert metrics["mask_mean"] < 1


def test_a_sequential_ffn_is_found():
    model = tiny.with_lora(nn.Sequential(nn.Linear(8, 20), nn.Mish(), nn.Dropout(0.1), nn.Linear(20, 8)))
    (block,) = find_blocks(model).blocks
    assert (block.activation.name, block.width, block.up) == ("mish", 20, None)


def test_two_ffns_in_one_module_have_names_of_their_own():
    class Parallel(nn.Module):
        def __init__(self):
            super().__init__()
            self.a_in, self.a_out, self.b_in, self.b_out = (nn.Linear(8, 8) for _ in range(4))

        def forward(self, x):
            return self.a_out(nn.functional.silu(self.a_in(x))) + self.b_out(nn.functional.gelu(self.b_in(x)))

    model = tiny.with_lora(nn.Sequential(Parallel()))
    controller = nalora.attach(model, torch.optim.SGD(tiny.trainable(model), lr=0.1))
    names = [each.block.name.rpartition(".")[2] for each in controller.plan.blocks]
    assert names == ["a_in", "b_in"]
    model(torch.randn(3, 4, 8)).sum().backward()
    assert [group.tokens.tolist() for group in controller._window.groups] == [[12], [12]]


def plan(model, **settings):
    return make_plan(find_blocks(model), NALoRAConfig(**settings))


@pytest.mark.parametrize("targets", [["gate_proj"], ["gate_proj", "down_proj"], ["gate_proj", "up_proj", "down_proj"]])
def test_partial_adapters_with_the_gate_have_both_controls(targets):
    assert all(each.mask and each.scaling for each in plan(tiny.llama(target_modules=targets)).blocks)


@pytest.mark.parametrize("target", ["down_proj", "up_proj"])
def test_without_the_gate_only_step_scaling_acts_and_the_plan_gives_the_reason(target):
    model = tiny.llama(target_modules=[target])
    blocks = plan(model).blocks
    assert [(each.mask, each.scaling) for each in blocks] == [(False, True)] * 2
    assert blocks[0].mask_off == "gate_proj has no adapter"
    optimizer = torch.optim.SGD(tiny.trainable(model), lr=0.1)
    controller = nalora.attach(model, optimizer)
    tiny.sum_loss(model, tiny.tokens()).backward()
    optimizer.step()
    assert controller.metrics()[f"scale_{target.removesuffix('_proj')}"] != 1
    with pytest.raises(NALoRAError, match="gate_proj has no adapter.*switched off"):
        plan(model, scaling=False)


def test_split_targets_on_a_fused_model_are_reported():
    """target_modules of Llama adapt only down_proj in Phi-3: the plan shows the gate without an adapter."""
    model = tiny.with_lora(architecture("Phi3"), list(GATED))
    text = str(plan(model))
    assert "gate gate_up_proj[0:56] (no adapter)" in text
    assert "mask off: gate_up_proj has no adapter" in text


def test_attention_only_is_refused_with_a_sentence_that_names_what_is_missing():
    model = tiny.llama(target_modules=["q_proj", "v_proj"])
    with pytest.raises(NALoRAError, match=r"adapters on q_proj, v_proj alone.*FFN projection"):
        nalora.attach(model, torch.optim.SGD(tiny.trainable(model)))


@pytest.mark.parametrize("name", ["Llama", "GPT-2", "OPT"])
@pytest.mark.parametrize("with_gate", [True, False])
@pytest.mark.parametrize("settings", [{"mask": False}, {"scaling": False}, {}], ids=str)
def test_where_no_control_can_act_each_of_the_fixes_switches_one_on(name, with_gate, settings):
    gate, down = {"Llama": GATED[::2], "GPT-2": ("c_fc", "mlp.c_proj"), "OPT": ("fc1", "fc2")}[name]

    def planned(targets, **more):
        return plan(tiny.with_lora(architecture(name), targets), **settings | more)

    targets = [gate, down] if with_gate else [down]
    try:
        assert any(each.mask or each.scaling for each in planned(targets).blocks)
        return
    except NALoRAError as error:
        fixes = error.fix.split(", or ")
    for fix in fixes:
        if added := re.fullmatch(r"add (.*) to target_modules", fix):
            found = planned([*targets, added[1]])
        elif fix == "give NALoRAConfig thresholds=(low, high)":
            found = planned(targets, thresholds=(-1.0, 1.0))
        else:
            key, _, value = fix.removeprefix("set ").partition("=")
            found = planned(targets, **{key: value.strip("'") if "'" in value else value == "True"})
        assert any(each.mask or each.scaling for each in found.blocks)


def test_gelu_and_relu_regimes():
    gelu, relu = (tiny.with_lora(architecture(name)) for name in ("ViT", "T5 v1.0"))
    assert "the paper calls gelu degenerate" in plan(gelu).blocks[0].scaling_off
    assert plan(gelu, regimes="derived").blocks[0].scaling
    assert plan(gelu, regimes="derived").blocks[0].thresholds == pytest.approx((-0.751791525, 0.839923676), abs=1e-9)
    assert plan(relu, regimes="derived").blocks[0].scaling_off == "relu has no finite regimes"
    assert plan(relu, thresholds=(-1.0, 1.0)).blocks[0].scaling


@EXPERTS
@pytest.mark.filterwarnings("ignore")
def test_experts_shared_experts_and_routers():
    settings = dict(target_modules="all-linear", target_parameters=["experts.gate_up_proj", "experts.down_proj"])
    qwen = peft.get_peft_model(architecture("Qwen2-MoE"), peft.LoraConfig(r=2, **settings))
    found = find_blocks(qwen)
    assert [block.name.rpartition("model.")[2] for block in found.blocks] == [
        "layers.0.mlp.experts",
        "layers.0.mlp.shared_expert",
        "layers.1.mlp.experts",
        "layers.1.mlp.shared_expert",
    ]
    assert all("bare parameter Qwen2MoeTopKRouter" in reason for reason in found.refused.values())
    optimizer = torch.optim.SGD(tiny.trainable(qwen), lr=0.1)
    controller = nalora.attach(qwen, optimizer)
    mask = torch.ones(4, 12, dtype=torch.long)
    mask[0, 7:] = 0
    tiny.sum_loss(qwen, tiny.tokens(), mask).backward()
    experts, shared = (group.tokens for group in controller._window.groups)
    assert experts.view(2, 4).sum(1).tolist() == [43 * 4, 43 * 4]
    assert shared.tolist() == [43, 43]
    optimizer.step()
    assert controller.metrics()["mask_mean"] < 1


def test_two_activations_in_one_product_are_refused():
    class DoublyBent(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.out = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)

        def forward(self, x):
            return self.out(torch.tanh(self.one(x)) * torch.nn.functional.silu(self.two(x)))

    found = find_blocks(tiny.with_lora(nn.Sequential(DoublyBent())))
    assert not found.blocks
    assert set(found.refused.values()) == {"both factors of its product pass through an activation"}


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (peft.AdaLoraConfig(target_modules=["gate_proj"], total_step=10), "adalora"),
        (peft.VeraConfig(target_modules=["gate_proj"]), "vera"),
        (peft.LoHaConfig(target_modules=["gate_proj"]), "loha"),
    ],
)
def test_other_adapters_are_refused_by_name(config, named):
    model = peft.get_peft_model(architecture("Llama"), config)
    with pytest.raises(NALoRAError, match=named):
        find_blocks(model)


def test_a_model_without_adapters_reports_what_it_saw():
    with pytest.raises(NALoRAError, match=r"no LoRA layers \(LlamaForCausalLM with 15 linear layers\)"):
        find_blocks(architecture("Llama"))


def test_discovery_leaves_the_model_untouched():
    model = tiny.llama()
    before = {name: p.clone() for name, p in model.named_parameters()}
    state = torch.get_rng_state()
    find_blocks(model)
    assert torch.equal(state, torch.get_rng_state())
    assert model.training
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in model.named_parameters())
