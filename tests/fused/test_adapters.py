"""Adapters are cast once per forward pass from their current values, and the result is not reused later."""

from __future__ import annotations

import pytest
import tiny
import torch

from nalora.kernels.fused import adapters as module
from nalora.kernels.fused.adapters import Adapters, StepFactors, adapters_of, cast


def random_adapters(scalings=(2.0, 0.5)):
    shapes = [((4, 12), (7, 4)), ((2, 12), (5, 2))]
    pairs = [(torch.randn(a), torch.randn(b)) for a, b in shapes[: len(scalings)]]
    return Adapters(*zip(*pairs, strict=True), tuple(scalings))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_factors_are_the_adapters_rounded_once(dtype):
    groups = [random_adapters(), random_adapters((1.5,))]
    for made, group in zip(cast(groups, dtype), groups, strict=True):
        scaled = [a * s for a, s in zip(group.a, group.scalings, strict=True)]
        assert torch.equal(made.a, torch.cat(scaled).to(dtype))
        assert all(torch.equal(b, original.to(dtype)) for b, original in zip(made.b, group.b, strict=True))


@pytest.fixture
def casts(monkeypatch):
    """How many groups each call of `cast` had."""
    sizes: list[int] = []

    def counted(groups, dtype):
        sizes.append(len(groups))
        return cast(groups, dtype)

    monkeypatch.setattr(module, "cast", counted)
    return sizes


def test_one_pass_casts_all_and_the_next_one_again(casts):
    model = tiny.llama(torch.float32)
    layers = [m for m in model.modules() if hasattr(m, "lora_A")][:3]
    factors = StepFactors()
    factors.groups = [(layers[0], layers[1]), (layers[2],)]
    undo = factors.attach(model)
    seen = []

    def read(*_):
        seen.append([factors.get(group, adapters_of(group), torch.bfloat16) for group in factors.groups])

    handle = layers[2].register_forward_hook(read)
    ids = tiny.tokens()
    model(input_ids=ids)
    assert casts == [2]
    with torch.no_grad():
        layers[0].lora_B["default"].weight.fill_(3.0)
    model(input_ids=ids)
    assert casts == [2, 2]
    assert seen[1][0].b[0].eq(3.0).all()
    read()
    assert casts == [2, 2, 1, 1]  # outside a pass: each by itself
    handle.remove()
    for put_back in undo:
        put_back()
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_a_failing_pass_leaves_no_factors_behind(casts):
    model = tiny.llama(torch.float32)
    layer = next(m for m in model.modules() if hasattr(m, "lora_A"))
    factors = StepFactors()
    factors.groups = [(layer,)]
    factors.attach(model)
    with pytest.raises(ValueError, match="input_ids"):
        model()
    factors.get((layer,), adapters_of((layer,)), torch.bfloat16)
    factors.get((layer,), adapters_of((layer,)), torch.bfloat16)
    assert casts == [1, 1]
