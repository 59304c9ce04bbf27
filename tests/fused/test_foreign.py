"""Whatever else an FFN computes, and code of others on a layer, is never lost: such layers are left to PEFT."""

from __future__ import annotations

import types

import pytest
import tiny
import torch
import transformers
from torch import nn
from torch.nn.functional import dropout, silu

import nalora
from nalora.kernels.fused.replaced_forward import replaced_by

pytest.importorskip("triton")


class FFN(nn.Module):
    """A gated FFN that computes something else besides."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.gate, self.up = nn.Linear(16, 32, bias=False), nn.Linear(16, 32, bias=False)
        self.down = nn.Linear(32, 16, bias=False)
        if kind == "module":
            self.drop = nn.Dropout(0.01)
        if kind in ("gamma", "out", "residual", "scaled"):
            self.gamma = nn.Parameter({"gamma": torch.ones(32), "out": torch.ones(16)}.get(kind, torch.zeros(1)))
        if kind == "buffer":
            self.register_buffer("factor", torch.ones(32))

    def forward(self, hidden, scale=None):
        x = hidden
        z, u = self.gate(x), self.up(x)
        if self.kind == "up clamp":
            u = u.clamp(-100, 100)
        h = silu(z.clamp(max=7) if self.kind == "gate clamp" else z) * u
        if self.kind == "product clamp":
            h = h.clamp(max=4000)
        if self.kind == "module":
            h = self.drop(h)
        if self.kind == "function":
            h = dropout(h, 0.01, self.training)
        if self.kind == "training" and self.training:
            h = h * 2
        if self.kind in ("gamma", "buffer"):
            h = h * (self.gamma if self.kind == "gamma" else self.factor)
        y = self.down(h)
        if self.kind == "out":
            y = y * self.gamma
        if self.kind == "residual":
            y = y + self.gamma * x
        if self.kind == "in place":
            y += x.detach()
        return y


class Net(nn.Module):
    def __init__(self, mlp) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, x, by_name=False):
        return self.mlp(hidden=x) if by_name else self.mlp(x)


def net(kind="plain", **lora):
    torch.manual_seed(0)
    mlp = FFN(kind) if isinstance(kind, str) else kind
    model = tiny.with_lora(Net(mlp), target_modules=[n for n, m in mlp.named_modules() if isinstance(m, nn.Linear)])
    for name in ("gamma",):
        if hasattr(mlp, name):
            getattr(mlp, name).requires_grad_(True)
    return model


def outputs(model, x, **arguments):
    torch.manual_seed(5)
    model.zero_grad()
    y = model(x, **arguments)
    y.square().sum().backward()
    return [y.detach(), *(p.grad for p in tiny.trainable(model))]


def assert_pefts_results(model, x, **arguments):
    """Compare with what the same model computes without fused functions."""
    ours = outputs(model, x, **arguments)
    vars(model)["nalora_layers"].undo()
    for one, other in zip(ours, outputs(model, x, **arguments), strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm()


def is_one_function(model):
    return replaced_by(model.base_model.model.mlp) is not None


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("plain", ""),
        ("gate clamp", ""),
        ("module", "dropout inside the FFN (drop)"),
        ("function", "something else in training"),
        ("training", "something else in training"),
        ("gamma", "parameter or buffer of its own (gamma)"),
        ("out", "parameter or buffer of its own (gamma)"),
        ("residual", "parameter or buffer of its own (gamma)"),
        ("buffer", "parameter or buffer of its own (factor)"),
        ("up clamp", "limits large values"),
        ("product clamp", "limits large values"),
        ("in place", "not a module with separate"),
    ],
)
def test_what_else_an_ffn_computes(kind, reason):
    model = net(kind)
    layers = nalora.fuse(model)
    assert is_one_function(model) == (reason == "")
    assert reason in str(layers)
    assert_pefts_results(model, torch.randn(2, 5, 16) * 60)


def test_ffns_of_models_with_dropout_and_limits():
    from transformers.models.t5.modeling_t5 import T5DenseGatedActDense

    for rate in (0.0, 0.3):
        config = transformers.T5Config(d_model=16, d_ff=32, feed_forward_proj="gated-gelu", dropout_rate=rate)
        model = net(T5DenseGatedActDense(config))
        nalora.fuse(model)
        assert is_one_function(model) == (rate == 0)
        # Dropout that begins later is noticed too.
        model.base_model.model.mlp.dropout.p = 0.3
        assert_pefts_results(model, torch.randn(2, 5, 16))
    half = T5DenseGatedActDense(config)
    half.dropout.p = 0.0
    half.bfloat16().wo.float()
    model = net(half)
    assert "projections in torch.bfloat16 and torch.float32" in str(nalora.fuse(model))
    assert not is_one_function(model)
    glm = pytest.importorskip("transformers.models.glm5_next.modeling_glm5_next")
    config = types.SimpleNamespace(
        hidden_size=16, intermediate_size=32, hidden_act="silu", swiglu_limit=10.0, mlp_bias=False
    )
    model = net(glm.Glm5NextTextMLP(config))
    nalora.fuse(model)
    assert_pefts_results(model, torch.randn(2, 5, 16) * 60)


def test_a_call_by_keyword():
    model = net()
    nalora.fuse(model)
    assert is_one_function(model)
    assert_pefts_results(model, torch.randn(2, 16), by_name=True)


def hook(module, args, output):
    return output * 2


@pytest.mark.parametrize("place", ["up", "down.base_layer", "gate.lora_A.default", "down.lora_dropout.default"])
def test_hooks_inside_are_called(place):
    model = net()
    model.base_model.model.mlp.get_submodule(place).register_forward_hook(hook)
    assert "a hook (hook) on" in str(nalora.fuse(model))
    assert not is_one_function(model)
    assert_pefts_results(model, torch.randn(2, 16))


@pytest.mark.parametrize("place", ["", "up", "down.base_layer", "gate.lora_A.default"])
def test_forwards_of_others_are_called(place):
    model = net()
    module = model.base_model.model.mlp.get_submodule(place)
    before = module.forward
    module.forward = lambda x: before(x) * 3
    layers = nalora.fuse(model)
    if place:  # the replica of an FFN calls its own forward, and finds no FFN then
        assert "a forward that other code replaced" in str(layers)
    assert_pefts_results(model, torch.randn(2, 16))


@pytest.mark.parametrize("fused_first", [False, True])
def test_offloaded_weights(fused_first):
    accelerate = pytest.importorskip("accelerate")
    x = torch.randn(2, 16)
    expected = outputs(net(), x)[0]
    model = net()
    if fused_first:
        nalora.fuse(model)
    accelerate.cpu_offload(model.base_model.model.mlp, execution_device="cpu")
    if not fused_first:
        assert "accelerate's hook" in str(nalora.fuse(model))
    for _ in range(2):
        torch.testing.assert_close(model(x), expected)


def test_a_projection_that_is_replaced():
    model = net()
    layers = nalora.fuse(model)
    mlp = model.base_model.model.mlp
    mlp.up = nn.Linear(16, 32, bias=False)
    y = mlp(x := torch.randn(2, 16))
    torch.testing.assert_close(y, mlp.down(silu(mlp.gate(x)) * mlp.up(x)))
    model = net()
    layers = nalora.fuse(model)
    plain = model.unload()
    torch.testing.assert_close(plain(x), Net.forward(plain, x))
    with torch.no_grad():
        expected = plain(x)
    torch.testing.assert_close(plain(x), expected)
    layers.undo()


def test_a_base_weight_that_is_trained_later():
    model = net()
    nalora.fuse(model)
    model.requires_grad_(True)
    outputs(model, torch.randn(2, 16))
    assert all(p.grad is not None for p in model.parameters())


def test_an_activation_in_place_behind_a_lora_layer():
    model = tiny.with_lora(nn.Sequential(nn.Linear(16, 16), nn.ReLU(inplace=True), nn.Linear(16, 16)), ["0", "2"])
    nalora.fuse(model)
    model(torch.randn(3, 16)).sum().backward()
