"""Adapters on a part of a model, several adapters, and parameters that change: fused layers give PEFT's results."""

from __future__ import annotations

import gc
import weakref

import peft
import pytest
import tiny
import torch
from torch import nn

import nalora

pytest.importorskip("triton")


def batch():
    ids = tiny.tokens()
    return {"input_ids": ids, "labels": ids}


def gradients(model, **arguments):
    model.zero_grad()
    loss = model(**arguments).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in tiny.trainable(model))]


def assert_same(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "targets", [["down_proj"], ["o_proj"], ["q_proj", "down_proj"], ["q_proj", "v_proj", "o_proj"], ["gate_proj"]]
)
def test_adapters_on_a_part_of_the_layers(targets):
    models = [tiny.llama(torch.float32, target_modules=targets) for _ in range(2)]
    nalora.fuse(models[1])
    assert_same(*(gradients(model, **batch()) for model in models))


@pytest.mark.parametrize("second", [["q_proj", "v_proj"], ["gate_proj"], ["o_proj"]])
def test_an_active_adapter_on_a_part_of_a_group(second):
    models = []
    for _ in range(2):
        model = tiny.llama(torch.float32)
        torch.manual_seed(3)
        model.add_adapter("b", peft.LoraConfig(r=2, target_modules=second, init_lora_weights=False))
        models.append(model)
    nalora.fuse(models[1])
    for name in ("b", "default", "b"):
        for model in models:
            model.set_adapter(name)
        assert_same(*(gradients(model, **batch()) for model in models))


class Two(nn.Module):
    """Two layers with one input, between which a test does something."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.between = lambda model, x: None

    def forward(self, x):
        first = self.a(x)
        self.between(self, x)
        return first, self.b(x)


def two(seed=0):
    torch.manual_seed(seed)
    return tiny.with_lora(Two(), target_modules=["a", "b"])


def unfreeze(model, x):
    model.b.base_layer.weight.requires_grad_(True)


def scale(model, x):
    with torch.no_grad():
        model.b.lora_B.default.weight.mul_(3)


def disable(model, x):
    model.b.enable_adapters(False)


def replace_base(model, x):
    torch.manual_seed(7)
    model.b.base_layer = nn.Linear(8, 8).requires_grad_(False)


def need_gradient(model, x):
    x.requires_grad_()


@pytest.mark.parametrize("change", [unfreeze, scale, disable, replace_base, need_gradient])
def test_what_changes_between_two_layers_is_noticed(change):
    results = []
    for fused in (False, True):
        model = two()
        if fused:
            nalora.fuse(model)
        inner = model.base_model.model
        inner.between = change
        x = torch.linspace(-1, 1, 24).reshape(3, 8)
        first, second = model(x)
        (first.square().sum() + second.square().sum()).backward()
        base = inner.b.base_layer.weight.grad
        results.append([first, second, x.grad, base, *(p.grad for p in tiny.trainable(model))])
    for ours, theirs in zip(*results, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs)


def test_autocast_that_ends_between_two_layers():
    dtypes = []
    for fused in (False, True):
        model = two()
        if fused:
            nalora.fuse(model)
        x = torch.randn(3, 8)
        with torch.autocast("cpu", torch.bfloat16):
            first = model.base_model.model.a(x)
        dtypes.append((first.dtype, model.base_model.model.b(x).dtype))
    assert dtypes[0] == dtypes[1]


def test_an_unused_result_does_not_keep_the_graph():
    class Kept(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.kept = x.clone()
            Kept.reference = weakref.ref(ctx.kept)
            return x * 1

        @staticmethod
        def backward(ctx, dy):
            return dy

    class OnlyOne(Two):
        def forward(self, x):
            x = Kept.apply(x.requires_grad_())
            return self.a(x) if self.training else self.b(x)

    model = tiny.with_lora(OnlyOne(), target_modules=["a", "b"])
    nalora.fuse(model)
    model(torch.randn(3, 8)).sum().backward()
    gc.collect()
    assert Kept.reference() is None


def test_an_optimizer_step_inside_a_pass():
    """A model inside another one, whose pass is a whole training."""

    class Training(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model
            self.optimizer = torch.optim.SGD(tiny.trainable(model), lr=0.1)

        def forward(self, x):
            losses = []
            for _ in range(3):
                self.optimizer.zero_grad()
                loss = sum(y.square().mean() for y in self.model(x.clone()))
                loss.backward()
                self.optimizer.step()
                losses.append(loss.item())
            return losses

    x = torch.randn(3, 8)
    plain, fused = Training(two()), Training(two())
    nalora.fuse(fused)
    assert fused(x) == pytest.approx(plain(x), rel=1e-5)


@pytest.mark.parametrize("shape", [(0, 5, 8), (0, 8), (2, 0, 8), (8,)])
def test_inputs_without_tokens_and_without_a_batch(shape):
    model = two()
    nalora.fuse(model)
    first, second = model(torch.zeros(shape))
    assert first.shape == second.shape == shape
    (first + second).sum().backward()


def test_outputs_are_changed_in_place():
    results = []
    for fused in (False, True):
        model = two()
        if fused:
            nalora.fuse(model)
        x = torch.linspace(-1, 1, 24).reshape(1, 3, 8)
        first, second = model(x)
        first += 1
        (first * second.relu_()).sum().backward()
        results.append([p.grad for p in tiny.trainable(model)])
    assert_same(*results)


def test_an_output_that_is_not_used_gives_its_adapter_no_gradient():
    model = two()
    nalora.fuse(model)
    first, _ = model(torch.randn(3, 8))
    first.sum().backward()
    inner = model.base_model.model
    assert inner.a.lora_A.default.weight.grad is not None
    assert inner.b.lora_A.default.weight.grad is None
    assert inner.b.lora_B.default.weight.grad is None
