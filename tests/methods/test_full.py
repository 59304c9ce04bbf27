"""Full fine-tuning: small steps are not rounded away on 16-bit weights."""

from __future__ import annotations

import pytest
import tiny
import torch

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
