"""DoRA against its equation, written out in float64."""

from __future__ import annotations

import torch
from methods.small import llama, tokens

from nalora import methods
from nalora.methods.lora import lora_layers
from nalora.methods.method import Adapter, Start


def prepared(dtype=torch.float32):
    return methods.get("dora")().prepare(llama(dtype), Adapter(rank=4, alpha=8), Start())


def magnitude(layer):
    return layer.lora_magnitude_vector["default"].weight


def test_it_starts_as_the_model_with_the_rows_own_lengths():
    model, ids = prepared(), tokens()
    torch.testing.assert_close(model(ids).logits, llama()(ids).logits, rtol=0, atol=1e-5)
    layers = list(lora_layers(model))
    assert len(layers) == 14
    for _, layer in layers:
        expected = layer.get_base_layer().weight.double().norm(dim=1)
        torch.testing.assert_close(magnitude(layer).double(), expected, rtol=1e-6, atol=0)


def test_rows_have_the_length_mu_and_the_direction_of_the_sum():
    for _, layer in lora_layers(prepared()):
        layer.lora_B["default"].weight.data.normal_()
        magnitude(layer).data.uniform_(0.5, 2)
        w, a, b, mu = (
            each.detach().double()
            for each in (
                layer.get_base_layer().weight,
                layer.lora_A["default"].weight,
                layer.lora_B["default"].weight,
                magnitude(layer),
            )
        )
        summed = w + 8 / 4 * b @ a
        expected = mu[:, None] * summed / summed.norm(dim=1, keepdim=True)
        x = torch.randn(5, layer.in_features)
        torch.testing.assert_close(layer(x).double(), x.double() @ expected.T, rtol=1e-4, atol=1e-4)


def test_everything_trainable_is_float32_on_a_16_bit_base():
    learning = {name: p for name, p in prepared(torch.bfloat16).named_parameters() if p.requires_grad}
    assert {name.split(".")[-3] for name in learning if "magnitude" not in name} == {"lora_A", "lora_B"}
    assert sum("magnitude" in name for name in learning) == 14
    assert {p.dtype for p in learning.values()} == {torch.float32}
