"""Layers with the same input are computed together, and give PEFT's results for any inputs."""

from __future__ import annotations

import fused_calls
import pytest
import tiny
import torch
from torch import nn

from nalora.kernels.fused.adapters import StepFactors
from nalora.kernels.fused.linears import children_sharing_input, fuse_linears


class Three(nn.Module):
    """Three layers whose inputs a test chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(6, 6), nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x, for_k, for_v):
        if for_k is x and for_v is x:
            return self.q(x), self.k(x), self.v(x)
        return self.q(x), self.k(for_k), self.v(for_v)


@pytest.fixture
def three(monkeypatch):
    """The fused layers, the same of PEFT's, and how many layers each call of the function computed."""
    torch.manual_seed(0)
    model = tiny.with_lora(Three().double(), target_modules=["q", "k", "v"]).base_model.model
    sizes = fused_calls.counted(monkeypatch)
    layers = dict(model.named_children())
    undo = fuse_linears(model, layers, StepFactors())

    def peft(*inputs):
        forwards = [layer.__dict__.pop("forward") for layer in layers.values()]
        outputs = model(*inputs)
        for layer, forward in zip(layers.values(), forwards, strict=True):
            layer.forward = forward
        return outputs

    yield model, peft, sizes
    for put_back in undo:
        put_back()


def random(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def check(model, peft, *inputs):
    for ours, theirs in zip(model(*inputs), peft(*inputs), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_the_first_call_computes_all(three):
    model, peft, sizes = three
    for _ in range(3):
        x = random(5, 6)
        check(model, peft, x, x, x)
    assert sizes == [3, 3, 3]


def test_inputs_that_differ_from_the_source_are_computed_separately(three):
    model, peft, _ = three
    check(model, peft, random(5, 6), random(5, 6), random(3, 6))


def test_an_input_that_changed_in_between_is_another_input(three):
    model, peft, _ = three
    x = random(5, 6)
    q = model.q(x)
    x.mul_(2)
    k = model.k(x)
    torch.testing.assert_close(k, peft(x, x, x)[1])
    torch.testing.assert_close(q, peft(x / 2, x, x)[0])


def test_gradients_of_layers_computed_together(three):
    model, peft, _ = three
    results = []
    for forward in (model, peft):
        x = torch.linspace(-1, 1, 30, dtype=torch.float64).reshape(5, 6).requires_grad_()
        model.zero_grad()
        sum(y.square().sum() for y in forward(x, x, x)).backward()
        results.append([x.grad, *(p.grad.clone() for p in tiny.trainable(model))])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_groups_are_read_from_the_forward():
    class Reassigned(nn.Module):
        def forward(self, x, y):
            a = self.first(x)
            x = self.second(x)
            return self.third(x), self.fourth(y), self.fifth(y, 1), self.sixth(x), a

    assert children_sharing_input(Reassigned()) == [["first", "second"], ["third", "sixth"]]
    model = tiny.llama(torch.float32).base_model.model.model.layers[0]
    assert children_sharing_input(model.self_attn) == [["q_proj", "k_proj", "v_proj"]]
    assert children_sharing_input(nn.Linear(2, 2)) == []
