"""Full fine-tuning: small steps are not rounded away on 16-bit weights; named modules are trained alone."""

from __future__ import annotations

import pytest
import tiny
import torch

from nalora.errors import NALoRAError
from nalora.methods.full import Full
from nalora.methods.method import Adapter, Start


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_weights_learn_in_float32_from_where_they_were(dtype):
    model = tiny.llama(dtype).unload()
    before = {name: parameter.detach().float() for name, parameter in model.named_parameters()}
    model = Full().prepare(model, Adapter(), Start())
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad
        assert parameter.dtype is torch.float32
        assert torch.equal(parameter, before[name])
    weight = model.model.layers[0].mlp.gate_proj.weight
    weight.grad = torch.ones_like(weight)
    torch.optim.SGD([weight], lr=1e-5).step()
    assert (weight != before["model.layers.0.mlp.gate_proj.weight"]).float().mean() > 0.9


def test_float64_weights_stay_what_they_are():
    model = Full().prepare(tiny.llama(torch.float64).unload(), Adapter(), Start())
    assert all(parameter.dtype is torch.float64 for parameter in model.parameters())


@pytest.mark.parametrize(
    ("modules", "trained"),
    [
        ("all-linear", {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}),
        (["mlp"], {"gate_proj", "up_proj", "down_proj"}),
        (["layers.1.mlp.gate_proj", "embed_tokens"], {"gate_proj", "embed_tokens"}),
        (r".*norm", {"input_layernorm", "post_attention_layernorm", "norm"}),
    ],
)
def test_the_named_modules_alone_are_trained(modules, trained):
    model = Full(trained_modules=modules).prepare(tiny.llama(torch.bfloat16).unload(), Adapter(), Start())
    names = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {name.split(".")[-2] for name in names} == trained
    assert all(parameter.dtype is torch.float32 for parameter in model.parameters())
    if modules == ["layers.1.mlp.gate_proj", "embed_tokens"]:
        assert names == {"model.layers.1.mlp.gate_proj.weight", "model.embed_tokens.weight"}


@pytest.mark.parametrize("modules", [["gate_projection"], "gate_projection", ["gate_proj", "gate_projection"]])
def test_a_name_that_no_module_has_is_refused(modules):
    with pytest.raises(NALoRAError, match="trained_modules"):
        Full(trained_modules=modules).prepare(tiny.llama(torch.float32).unload(), Adapter(), Start())
