"""Decoders of many architectures, each adapted as `nalora train` does: the right gates are controlled, by the numbers.

Where nothing can be controlled the refusal's advice is followed to the letter: it works, or it is true that nothing can
be done.
"""

from __future__ import annotations

import re

import peft
import pytest
import torch
from installed import EXPERTS
from small_models import causal_model, tokens
from torch import nn
from torch.nn import functional as F  # noqa: N812

import nalora
from nalora import NALoRAConfig, NALoRAError, methods
from nalora.methods.lora import DoRA, LoRA
from nalora.methods.lora_pro import pairs_of
from nalora.methods.method import Adapter, Start

pytestmark = pytest.mark.filterwarnings("ignore")


def gelu_tanh(z):
    return F.gelu(z, approximate="tanh")


def relu2(z):
    return F.relu(z).square()


ALL, FIRST_HALF = slice(None), slice(0, 56)
GATE = r"\.mlp\.gate_proj$"
# model type: (settings, names of the gate layers, their number, rows, φ)
CONTROLLED = {
    "llama": ({}, GATE, 2, ALL, F.silu),
    "mistral": ({}, GATE, 2, ALL, F.silu),
    "qwen2": ({}, GATE, 2, ALL, F.silu),
    "qwen3": ({}, GATE, 2, ALL, F.silu),
    "olmo2": ({}, GATE, 2, ALL, F.silu),
    "cohere": ({}, GATE, 2, ALL, F.silu),
    "granite": ({}, GATE, 2, ALL, F.silu),
    "stablelm": ({}, GATE, 2, ALL, F.silu),
    "gemma": ({}, GATE, 2, ALL, gelu_tanh),
    "gemma2": ({}, GATE, 2, ALL, gelu_tanh),
    "gemma3_text": ({}, GATE, 2, ALL, gelu_tanh),
    "phi3": ({}, r"\.mlp\.gate_up_proj$", 2, FIRST_HALF, F.silu),
    "glm4": ({}, r"\.mlp\.gate_up_proj$", 2, FIRST_HALF, F.silu),
    "phi": ({}, r"\.mlp\.fc1$", 2, ALL, gelu_tanh),
    "starcoder2": ({}, r"\.mlp\.c_fc$", 2, ALL, gelu_tanh),
    "gpt2": ({}, r"\.mlp\.c_fc$", 2, ALL, gelu_tanh),
    "gpt_bigcode": ({}, r"\.mlp\.c_fc$", 2, ALL, gelu_tanh),
    "gptj": ({}, r"\.mlp\.fc_in$", 2, ALL, gelu_tanh),
    "codegen": ({}, r"\.mlp\.fc_in$", 2, ALL, gelu_tanh),
    "gpt_neox": ({}, r"\.mlp\.dense_h_to_4h$", 2, ALL, F.gelu),
    "falcon": ({}, r"\.mlp\.dense_h_to_4h$", 2, ALL, F.gelu),
    "bloom": ({}, r"\.mlp\.dense_h_to_4h$", 2, ALL, gelu_tanh),
    "mpt": ({}, r"\.ffn\.up_proj$", 2, ALL, F.gelu),
    "opt": ({}, r"\.fc1$", 2, ALL, F.relu),
    "xglm": ({}, r"\.fc1$", 2, ALL, F.gelu),
    "biogpt": ({}, r"\.fc1$", 2, ALL, F.gelu),
    "nemotron": ({}, r"\.mlp\.up_proj$", 2, ALL, relu2),
    "persimmon": ({}, r"\.mlp\.dense_h_to_4h$", 2, ALL, relu2),
    "qwen3_moe": ({"mlp_only_layers": [0]}, GATE, 1, ALL, F.silu),
    "deepseek_v2": (
        {"first_k_dense_replace": 1, "head_dim": 4, "num_key_value_heads": 4},
        r"\.mlp\.(shared_experts\.)?gate_proj$", 2, ALL, F.silu,
    ),
    "deepseek_v3": (
        {"first_k_dense_replace": 1, "num_key_value_heads": 4},
        r"\.mlp\.(shared_experts\.)?gate_proj$", 2, ALL, F.silu,
    ),
    "glm4_moe": ({"first_k_dense_replace": 1}, r"\.mlp\.(shared_experts\.)?gate_proj$", 2, ALL, F.silu),
    "hunyuan_v1_moe": ({}, r"\.mlp\.shared_mlp\.gate_proj$", 2, ALL, F.silu),
    "ernie4_5_moe": ({}, r"\.mlp\.(shared_experts\.)?gate_proj$", 2, ALL, F.silu),
}  # fmt: skip


def adapted(model: nn.Module, targets="all-linear", method: LoRA | None = None) -> nn.Module:
    """As a run does, with B ≠ 0 so that all gradients are there."""
    return with_b((method or LoRA()).prepare(model, Adapter(4, 8, 0.0, targets), Start()))


def with_b(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.05
    return model.train()


def padding() -> torch.Tensor:
    """The second row is three tokens shorter."""
    mask = torch.ones_like(tokens())
    mask[1, -3:] = 0
    return mask


def backward(model: nn.Module) -> float:
    ids, mask = tokens(), padding()
    logits = model(input_ids=ids, attention_mask=mask).logits
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].masked_fill(mask[:, 1:] == 0, -100).flatten())
    loss.backward()
    return loss.item()


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def mask_of(z: torch.Tensor, phi) -> torch.Tensor:
    """The paper's mask of one observation: σ(β(k − its 70 % quantile)) with k = E|φ′(z)|."""
    z = z.reshape(*padding().shape, -1)[padding() > 0].double().requires_grad_()
    (slope,) = torch.autograd.grad(phi(z).sum(), z)
    k = slope.abs().mean(0)
    return torch.sigmoid(20 * (k - torch.quantile(k, 0.7)))


@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=EXPERTS if re.search("moe|deepseek", name) else ()) for name in CONTROLLED]
)
def test_the_gates_of_an_architecture_are_controlled(model_type):
    settings, gates, count, rows, phi = CONTROLLED[model_type]
    model = adapted(causal_model(model_type, **settings))
    layers = {name: module for name, module in model.named_modules() if re.search(gates, name)}
    assert len(layers) == count
    seen = {}
    for name, module in layers.items():
        module.register_forward_hook(lambda _, __, z, name=name: seen.__setitem__(name, z.detach()[..., rows]))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    controller = nalora.attach(model, optimizer, NALoRAConfig(start="first", scaling=False))
    assert {each.block.gate.name for each in controller.plan.blocks if not each.block.experts} == set(layers)
    assert all(each.mask for each in controller.plan.blocks)
    backward(model)
    before = gradients(model)
    controller.apply()
    after = gradients(model)
    assert before.keys() == after.keys()
    for name, gradient in before.items():
        layer = name.partition(".lora_")[0]
        if layer.endswith(".experts.base_layer") and ".lora_B." in name:  # gate and up of the experts in some layers
            assert (after[name] - gradient).norm() > 0.05 * gradient.norm() > 0
            continue
        expected = gradient
        if layer in layers and ".lora_B." in name:
            mask = mask_of(seen[layer], phi)
            assert mask.std() > 1e-3
            expected = gradient.clone()
            expected[rows] *= mask.float()[:, None]
            assert (expected - gradient).norm() > 0.05 * gradient.norm() > 0
        torch.testing.assert_close(after[name], expected, rtol=2e-5, atol=1e-9)


def refusal(model: nn.Module) -> NALoRAError:
    with pytest.raises(NALoRAError) as raised:
        nalora.attach(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1))
    assert "\n" not in str(raised.value)
    return raised.value


def controls(model: nn.Module) -> int:
    """How many gates are controlled, once a step was taken."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    controller = nalora.attach(model, optimizer)
    backward(model)
    optimizer.step()
    assert controller.metrics()["mask_mean"] < 1
    return len(controller.plan.blocks)


DENSE = {
    "qwen3_moe": (CONTROLLED["qwen3_moe"][0], 1),
    "deepseek_v3": (CONTROLLED["deepseek_v3"][0], 2),
    "glm4_moe": (CONTROLLED["glm4_moe"][0], 2),
}
# What a user would write with PEFT alone; the second adapts the experts of another layer in place of the dense layer.
TARGETS = ["all-linear", r"model\.layers\.0\.mlp\.(gate|up|down)_proj", ["gate_proj", "up_proj", "down_proj"]]


@EXPERTS
@pytest.mark.parametrize("targets", TARGETS, ids=str)
@pytest.mark.parametrize("model_type", DENSE)
def test_dense_layers_that_peft_passes_over_are_adapted_as_the_plan_says(model_type, targets):
    settings, count = DENSE[model_type]
    config = peft.LoraConfig(r=2, target_modules=targets)
    model = peft.get_peft_model(causal_model(model_type, **settings), config)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    plan = nalora.attach(model, optimizer).plan
    assert all(each.block.experts for each in plan.blocks)
    (advice,) = [line for line in plan.uncontrolled() if line.startswith("without an adapter: ")]
    assert "mlp.gate_proj" in advice
    (listed,) = re.findall(r"target_parameters=\[(.*?)\] to peft\.LoraConfig", advice)
    parameters = [name.strip('"') for name in listed.split(", ")]
    config = peft.LoraConfig(r=2, target_modules=["o_proj"], target_parameters=parameters)
    assert controls(with_b(peft.get_peft_model(causal_model(model_type, **settings), config))) == count
    # And in a run, as the words in brackets say.
    assert "in a run file of nalora target_modules does name them" in advice
    names = [name.removesuffix(".weight") for name in parameters]
    assert controls(adapted(causal_model(model_type, **settings), names)) == count


@EXPERTS
def test_only_the_layers_of_an_expression_are_adapted():
    settings = CONTROLLED["deepseek_v3"][0]
    for targets, expected in {
        r"model\.layers\.0\.mlp\.(gate|up|down)_proj": {f"layers.0.mlp.{each}_proj" for each in ("gate", "up", "down")},
        r"model\.layers\.1\.self_attn\.o_proj": {"layers.1.self_attn.o_proj"},
        r".*\.layers\.1\.mlp\.experts\.(gate|up)_proj": {"layers.1.mlp.experts"},
    }.items():
        model = adapted(causal_model("deepseek_v3", **settings), targets)
        names = {name for name, each in model.named_modules() if isinstance(each, peft.tuners.lora.LoraLayer)}
        assert {name.removeprefix("base_model.model.model.") for name in names} == expected


@EXPERTS
def test_half_of_the_experts_parameter_is_refused_with_what_works():
    settings = CONTROLLED["deepseek_v3"][0]
    with pytest.raises(NALoRAError, match="gate_proj without up_proj") as raised:
        adapted(causal_model("deepseek_v3", **settings), ["o_proj", "gate_proj"])
    one, other = re.fullmatch(r"add (.*), or name the layers outside the experts: (.*)", raised.value.fix).groups()
    assert controls(adapted(causal_model("deepseek_v3", **settings), ["o_proj", "gate_proj", one])) == 3  # and experts
    assert controls(adapted(causal_model("deepseek_v3", **settings), ["o_proj", *other.split(", ")])) == 2


@EXPERTS
def test_a_plan_names_the_layers_that_are_passed_over():
    """Some are controlled, so there is no error; the plan lists the others."""
    settings = CONTROLLED["deepseek_v3"][0]
    config = peft.LoraConfig(r=2, target_modules="all-linear", target_parameters=["shared_experts.gate_proj.weight"])
    model = peft.get_peft_model(causal_model("deepseek_v3", **settings), config)
    controller = nalora.attach(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1))
    text = str(controller.plan)
    assert (
        'without an adapter: mlp.down_proj, mlp.gate_proj, mlp.up_proj; pass target_parameters=["mlp.down_proj' in text
    )


@pytest.mark.parametrize("model_type", ["llama", "bloom", "phi3", "gpt2"])
def test_attention_alone_is_answered_with_the_names_to_add(model_type):
    attention = {"llama": "q_proj", "bloom": "query_key_value", "phi3": "qkv_proj", "gpt2": "c_attn"}[model_type]
    error = refusal(adapted(causal_model(model_type), [attention]))
    (names,) = re.findall(r"add the FFN projections to target_modules: (.*)", error.fix)
    assert controls(adapted(causal_model(model_type), [attention, *names.split(", ")])) == 2


@EXPERTS
@pytest.mark.parametrize("model_type", ["mixtral", "olmoe", "qwen3_moe", "flex_olmo", "mellum"])
def test_experts_that_peft_adapts_with_all_linear_layers_are_controlled(model_type):
    assert controls(adapted(causal_model(model_type))) == 2


@EXPERTS
@pytest.mark.parametrize("model_type", ["gpt_oss", "granitemoe", "phimoe"])
def test_experts_without_an_adapter_are_answered_with_their_parameters(model_type):
    error = refusal(adapted(causal_model(model_type)))
    assert "experts, whose parameters have no adapter" in error.found
    (listed,) = re.findall(r"target_parameters=\[(.*?)\] in peft\.LoraConfig", error.fix)
    parameters = [name.strip('"') for name in listed.split(", ")]
    config = peft.LoraConfig(r=2, target_modules=["o_proj"], target_parameters=parameters)
    assert controls(with_b(peft.get_peft_model(causal_model(model_type), config))) == 2
    adapter = Adapter(4, 8, 0.0, ["o_proj"], parameters)
    assert controls(with_b(LoRA().prepare(causal_model(model_type), adapter, Start()))) == 2


@EXPERTS
def test_experts_of_another_interface_are_reported_as_plain_loras():
    model = adapted(causal_model("jetmoe"))
    error = refusal(model)
    assert "experts in one parameter (JetMoeParallelExperts.weight)" in error.found
    assert "NA-LoRA cannot control these experts" in error.fix
    # True: no linear layer is in an FFN. And plain LoRA trains.
    linears = [n for n, m in causal_model("jetmoe").named_modules() if isinstance(m, nn.Linear) and n != "lm_head"]
    assert all(re.search("attn|attention|router|gate$", name) for name in linears), linears
    assert backward(model) > 0
    assert any(p.grad.abs().max() > 0 for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize(("model_type", "blocks"), [("mamba", 0), ("falcon_mamba", 0), ("falcon_h1", 2)])
def test_what_peft_refuses_in_mamba_is_answered_with_the_names_that_it_takes(model_type, blocks):
    with pytest.raises(NALoRAError, match="out_proj") as raised:
        adapted(causal_model(model_type))
    (names,) = re.findall(r"name layers that it can adapt: (.*)", raised.value.fix)
    model = adapted(causal_model(model_type), names.split(", "))
    if blocks:
        assert controls(model) == blocks
        return
    error = refusal(model)
    assert "no layer of this model is in an FFN" in error.found
    assert error.fix.startswith("train this model with plain LoRA")
    assert backward(model) > 0


def test_a_norm_inside_the_ffn_is_reported_as_not_recognised():
    model = adapted(causal_model("bitnet"))
    assert "no layer of this model is in an FFN of a form that nalora recognises" in refusal(model).found
    assert backward(model) > 0


@EXPERTS
def test_a_layer_below_the_rank_is_answered_with_the_names_of_the_others():
    """Qwen2-MoE's shared_expert_gate has one output."""
    with pytest.raises(NALoRAError, match="shared_expert_gate, a layer of 1 × 32") as raised:
        adapted(causal_model("qwen2_moe"))
    (names,) = re.findall(r"target_modules: \[(.*)\]", raised.value.fix)
    assert controls(adapted(causal_model("qwen2_moe"), names.split(", "))) == 2


@EXPERTS
def test_experts_have_no_dropout_and_no_dora():
    settings = CONTROLLED["qwen3_moe"][0]
    with pytest.raises(NALoRAError, match="lora_dropout") as raised:
        LoRA().prepare(causal_model("qwen3_moe", **settings), Adapter(4, 8, 0.1), Start())
    assert raised.value.fix.startswith("set dropout to 0")
    with pytest.raises(NALoRAError, match="use_dora") as raised:
        adapted(causal_model("qwen3_moe", **settings), method=DoRA())
    (names,) = re.findall(r"name layers outside the experts: (.*)", raised.value.fix)
    assert backward(adapted(causal_model("qwen3_moe", **settings), names.split(", "), method=DoRA())) > 0


@EXPERTS
@pytest.mark.parametrize("name", ["gora", "lora-ga", "lora-pro", "pissa"])
def test_methods_for_linear_layers_alone_say_which_they_are(name):
    """With the layers that are named in place of all of them the method works, dense layers of the model included."""
    settings = CONTROLLED["qwen3_moe"][0]
    method = methods.get(name).build(**{"gradient_batches": 1} if name in ("gora", "lora-ga") else {})
    ids = tokens()
    start = Start(batches=lambda n: [{"input_ids": ids, "labels": ids}] * n)

    def prepared(targets):
        model = method.prepare(causal_model("qwen3_moe", **settings), Adapter(2, 4, 0.0, targets), start)
        if name == "lora-pro":
            pairs_of(model)
        return model

    with pytest.raises(NALoRAError) as raised:
        prepared("all-linear")
    (names,) = re.findall(r"with target_modules: \[(.*)\]", raised.value.fix)
    assert backward(prepared(names.split(", "))) > 0
    assert ("mlp.gate_proj" in names) == (name in ("gora", "lora-pro"))


def test_names_that_no_layer_has_are_answered_with_those_of_transposed_layers():
    with pytest.raises(NALoRAError, match="among c_attn, c_proj, c_fc, lm_head") as raised:
        adapted(causal_model("gpt2"), ["zzz"])
    assert raised.value.fix == "leave target_modules out to adapt every linear layer"
    assert controls(adapted(causal_model("gpt2"))) == 2
