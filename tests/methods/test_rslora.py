"""rsLoRA's scaling."""

from __future__ import annotations

import pytest
import torch
from methods.small import llama

from nalora import methods
from nalora.methods.lora import lora_layers
from nalora.methods.method import Adapter, Start


@pytest.mark.parametrize(("name", "power"), [("lora", 1.0), ("rslora", 0.5)])
@pytest.mark.parametrize("rank", [2, 8])
def test_what_the_adapter_adds_is_alpha_over_the_root_of_r(name, power, rank):
    model = methods.get(name)().prepare(llama(), Adapter(rank=rank, alpha=12), Start())
    for _, layer in lora_layers(model):
        a, b = layer.lora_A["default"].weight.data, layer.lora_B["default"].weight.data
        b.normal_()
        x = torch.randn(3, layer.in_features)
        added = layer(x) - layer.get_base_layer()(x)
        torch.testing.assert_close(added, 12 / rank**power * x @ a.T @ b.T, rtol=1e-4, atol=1e-4)
