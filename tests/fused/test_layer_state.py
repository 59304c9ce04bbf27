"""What changes inside layers after their capture is noticed at the next pass."""

from __future__ import annotations

import contextlib
import logging

import peft
import pytest
import tiny
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import nalora
from nalora.control import fused_ffn, fused_model
from nalora.kernels.fused import graphed_layers

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytest.importorskip("triton")


class Operators(TorchDispatchMode):
    """Lists the operators that run."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        self.calls.append((function, args, kwargs or {}, results))
        return results


class Tape:
    """Captures operators, not Python, as CUDA does: a replay knows nothing that was decided on the host since."""

    replays = 0

    def __init__(self, model):
        self.model = model

    @contextlib.contextmanager
    def recording(self):
        """A capture computes nothing, so that gradients stay as they are."""
        before = [(p.grad, p.grad.clone()) for p in self.model.parameters() if p.grad is not None]
        yield
        for gradient, value in before:
            gradient.copy_(value)

    def record(self, function):
        with Operators() as operators:
            function()

        def replay():
            type(self).replays += 1
            with torch.no_grad():
                for operator, args, kwargs, results in operators.calls:
                    for result, again in zip(tree_leaves(results), tree_leaves(operator(*args, **kwargs)), strict=True):
                        if isinstance(result, torch.Tensor) and result.data_ptr() != again.data_ptr():
                            result.detach().copy_(again)

        return replay


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    """Triton's interpreter runs no operators, so that FFNs are computed layer by layer."""
    Tape.replays = 0
    if DEVICE == "cuda":
        return
    make = graphed_layers.graph_layers
    monkeypatch.setattr(fused_ffn, "triton_runs_on", lambda device: False)
    monkeypatch.setattr(fused_model, "refuse_unless_graphable", lambda model: None)
    monkeypatch.setattr(fused_model, "graph_layers", lambda model, factors: make(model, factors, lambda: Tape(model)))


def decoder(model):
    return model.get_base_model().model.layers


def lora_layers(model):
    return [module for module in model.modules() if isinstance(module, peft.tuners.lora.LoraLayer)]


def scaling(model):
    for layer in lora_layers(model):
        layer.scale_layer(3.0)


def dropout(model):
    """All of the adapter's inputs are dropped."""
    for layer in lora_layers(model):
        layer.lora_dropout["default"] = nn.Dropout(1.0)


def activation(model):
    for layer in decoder(model):
        layer.mlp.act_fn = nn.GELU()


def norm(model):
    for layer in decoder(model):
        layer.input_layernorm = nn.LayerNorm(32, device=DEVICE).requires_grad_(False)


def norm_forward(model):
    for layer in decoder(model):
        layer.input_layernorm.forward = lambda x: 2 * x


def hook(model):
    for layer in decoder(model):
        layer.input_layernorm.register_forward_hook(lambda module, args, output: 2 * output)


def nothing(model):
    pass


@pytest.mark.parametrize("change", [nothing, scaling, dropout, activation, norm, norm_forward, hook])
def test_a_change_after_the_capture(change, caplog):
    models = [tiny.llama(torch.float32, ffn=64).to(DEVICE) for _ in range(2)]
    nalora.fuse(models[0], cuda_graphs=True)
    for step in range(6):
        if step == 3:
            captured = Tape.replays
        gradients = []
        for model in models:
            if step == 3:
                change(model)
            ids = tiny.tokens(seed=step).to(DEVICE)
            with caplog.at_level(logging.WARNING, "nalora"):
                model(input_ids=ids, labels=ids).loss.backward()
            gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
            model.zero_grad()
        for name, gradient in gradients[1].items():
            torch.testing.assert_close(gradients[0][name], gradient, rtol=1e-3, atol=1e-5, msg=name)
    if DEVICE == "cpu":
        assert captured == 2 * 2 * 2
        # Captured anew after one eager pass, or eager for good.
        assert Tape.replays - captured == {nothing: 12, hook: 0}.get(change, 8)
    assert ("hooks were added" in caplog.text) is (change is hook)
