"""NA-LoRA on compiled layers: statistics, decisions and gradients of eager layers, in as few graphs."""

from __future__ import annotations

import pytest
import tiny
import tiny_experts
import torch
from test_compiled_layers import scaled_product
from test_fuse import DEVICE, batch, llama, replaced
from torch.optim import AdamW

import nalora
from nalora.control import fused_model
from nalora.kernels.statistics import engines

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(not engines.can_compile(torch.device("cpu")), reason="no C++ compiler")


def padded(seed):
    mask = torch.ones_like(batch()["input_ids"])
    mask[seed % len(mask), 5:] = 0
    return batch(seed) | {"attention_mask": mask}


def attached(model, compiled, **settings):
    nalora.fuse(model, compile_layers=compiled)
    optimizer = AdamW(tiny.trainable(model), lr=3e-3)
    return optimizer, nalora.attach(model, optimizer, **settings)


def train(model, optimizer, controller, steps=2):
    """Train with gradient accumulation, padding, and passes in between that must not be counted."""
    losses = []
    for step in range(steps):
        for half in range(2):
            loss = model(**padded(2 * step + half)).loss
            loss.backward()
            losses.append(loss.item())
        with torch.no_grad():
            model(**padded(7))
        model.eval()
        model(**padded(8))
        model.train()
        controller.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def same_training(eager, compiled, **settings):
    """Train both models; return the controllers."""
    controllers, losses = [], []
    for model, compiles in ((eager, False), (compiled, True)):
        optimizer, controller = attached(model, compiles, **settings)
        losses.append(train(model, optimizer, controller))
        controllers.append(controller)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert tiny.largest_difference(tiny.adapter_state(eager), tiny.adapter_state(compiled)) < 2e-5
    states = [controller.state_dict()["tensors"] for controller in controllers]
    assert states[0].keys() == states[1].keys()
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name], value, rtol=1e-4, atol=1e-5)
    assert controllers[1].metrics() == pytest.approx(controllers[0].metrics(), abs=1e-4)
    return controllers


@pytest.mark.parametrize("settings", [{}, {"importance": "utility", "apply_to": "update"}])
def test_training_is_that_of_layers_that_are_not_compiled(settings, graphs):
    same_training(llama(), llama(), **settings)
    assert graphs() <= 2


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputations_are_not_counted_again(reentrant, graphs):
    models = [llama() for _ in range(2)]
    for model in models:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    same_training(*models)
    assert graphs() >= 1


@pytest.mark.parametrize("base", ["keep", "fp8"])
def test_the_number_of_compilations_does_not_depend_on_the_number_of_layers(base, graphs, monkeypatch):
    if torch.device(DEVICE).type == "cpu":
        monkeypatch.setattr(torch, "_scaled_mm", scaled_product)
    model = llama(layers=12)
    nalora.fuse(model, base=base, compile_layers=True)
    optimizer = AdamW(tiny.trainable(model), lr=3e-3)
    train(model, optimizer, nalora.attach(model, optimizer))
    assert graphs() == 2


def test_the_operator_computes_exactly_what_an_eager_ffn_does(monkeypatch):
    """The same input twice in training, then in evaluation."""
    results = []
    for compiled in (False, True):
        model = llama()
        _, controller = attached(model, compiled)
        observer, host = controller._observers[0], controller.plan.blocks[0].block.host
        torch.manual_seed(1)
        x = torch.randn(2, 5, 32, device=DEVICE, requires_grad=True)
        # The operator itself, without torch.compile.
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda value=compiled: value)
        outputs = [host(x), host(x), host.eval()(x)]
        monkeypatch.undo()
        sum(y.square().sum() for y in outputs).backward()
        assert observer.window.passes == 2
        assert observer.window.sums.tokens.sum() == 20
        results.append([*outputs, *observer.window.sums, x.grad, *(p.grad for p in tiny.trainable(host))])
    for eager, operator in zip(*results, strict=True):
        assert torch.equal(eager, operator)


def test_errors_of_the_controller_pass_through_the_graph(graphs):
    model = llama()
    _, controller = attached(model, True)
    model(**padded(0)).loss.backward()
    controller.apply()
    with pytest.raises(nalora.NALoRAError, match="another forward pass after the control was applied"):
        model(**padded(0))
    assert graphs() >= 1


def test_a_controller_is_detached_and_the_layers_are_compiled_as_before(graphs):
    model = llama()
    layers = nalora.fuse(model, compile_layers=True)
    before = replaced(model)
    controller = nalora.attach(model, AdamW(tiny.trainable(model)))
    model(**padded(0)).loss.backward()
    assert controller._observers[0].window.passes == 1
    controller.detach()
    assert replaced(model) == before
    model(**padded(0)).loss.backward()
    assert graphs() >= 1
    layers.undo()
    assert not replaced(model)
    assert fused_model.fused_layers(model) is None


@pytest.mark.parametrize(
    ("lora", "kernels", "match"),
    [
        ({}, "off", "compile_layers=True. and kernels='off'"),
        ({"lora_dropout": 0.5}, "auto", "lora_dropout in training, in a compiled layer"),
        ({"target_modules": ["gate_proj", "down_proj"]}, "auto", "no adapter, in a compiled layer"),
        ({"rank_pattern": {"up_proj": 2}}, "auto", "adapters of ranks 2, 4"),
    ],
)
def test_gates_that_a_compiled_layer_cannot_observe_are_refused(lora, kernels, match):
    model = llama(**lora)
    layers = nalora.fuse(model, compile_layers=True)
    before = replaced(model)
    with pytest.raises(nalora.NALoRAError, match=match):
        nalora.attach(model, AdamW(tiny.trainable(model)), kernels=kernels)
    assert replaced(model) == before
    layers.undo()


def test_experts_are_refused():
    model = tiny_experts.adapted("Mixtral", dtype=torch.float32).to(DEVICE)
    nalora.fuse(model, compile_layers=True)
    with pytest.raises(nalora.NALoRAError, match="found experts, in a compiled layer"):
        nalora.attach(model, AdamW(tiny.trainable(model)))
