"""What holds of the reference holds of every engine and of the fused layers: they count the same tokens, once each.

`test_invariances.py` shows the invariances to the last digit in float64, which only the reference computes in. Here
every engine meets them in float32, and meets the reference.
"""

from __future__ import annotations

import pytest
import tiny
import torch
from torch.optim import AdamW

import nalora
from nalora import NALoRAConfig
from nalora.control import plan
from nalora.kernels.statistics import compiled, engines, reference

triton_engine = pytest.importorskip("nalora.kernels.statistics.triton_engine")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ENGINES = {
    "reference": reference.accumulate,
    "compiled": compiled.accumulate,
    "triton": triton_engine.accumulate,
}
EVERY = pytest.mark.parametrize("engine", [*ENGINES, "fused"])
LENGTHS = (12, 5, 9, 3)


@pytest.fixture
def train(monkeypatch):
    """Four steps of a tiny Llama on one engine: adapters, controller state and tokens counted."""

    def run(engine, step_losses, *, importance="derivative", checkpointing=None, between=lambda m: None, wrap=None):
        if engine in ENGINES:
            chosen = engines.Engine(engine, ENGINES[engine])
            monkeypatch.setattr(plan, "choose", lambda *args, **options: chosen)
        model = tiny.llama(torch.float32).to(DEVICE)
        if checkpointing is not None:
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": checkpointing})
        optimizer = AdamW(tiny.trainable(model), lr=1e-3)
        config = NALoRAConfig(importance=importance)
        controller = nalora.attach(model, optimizer, config, kernels="fused" if engine == "fused" else "auto")
        forward = wrap(model) if wrap else model
        counted = []
        for step in range(4):
            for loss in step_losses(forward, step):
                loss.backward()
            between(model)
            counted.append(controller._window.groups[0].tokens.tolist())
            controller.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
        controller.detach()
        return tiny.adapter_state(model), controller.state_dict()["tensors"], counted

    return run


def sequences(step):
    return [row[:length].to(DEVICE) for row, length in zip(tiny.tokens(4, 12, seed=step), LENGTHS, strict=True)]


def one_by_one(model, step):
    for row in sequences(step):
        yield tiny.sum_loss(model, row[None])


def padded(model, step):
    ids = torch.zeros(4, 12, dtype=torch.long, device=DEVICE)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(sequences(step)):
        ids[i, : len(row)], mask[i, : len(row)] = row, 1
    yield tiny.sum_loss(model, ids, mask)


def assert_same(one, other):
    assert one[2] == other[2]
    assert tiny.largest_difference(one[0], other[0]) < 2e-5
    for name, value in one[1].items():
        torch.testing.assert_close(other[1][name].double(), value.double(), rtol=0, atol=2e-5, msg=name)


@EVERY
@pytest.mark.parametrize("importance", ["derivative", "utility"])
def test_padded_whole_or_split_it_is_the_references_result(train, engine, importance):
    expected = train("reference", one_by_one, importance=importance)
    assert expected[2] == [[sum(LENGTHS)] * 2] * 4
    assert_same(expected, train(engine, padded, importance=importance))
    assert_same(expected, train(engine, one_by_one, importance=importance))


@EVERY
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(train, engine, reentrant):
    assert_same(train(engine, padded), train(engine, padded, checkpointing=reentrant))


@EVERY
def test_passes_without_a_gradient_do_not_count(train, engine):
    def score(model):
        with torch.no_grad():
            tiny.sum_loss(model, tiny.tokens(2, 12).to(DEVICE))
        model.eval()
        tiny.sum_loss(model, tiny.tokens(2, 12).to(DEVICE))
        model.train()

    assert_same(train(engine, padded), train(engine, padded, between=score))


@EVERY
def test_a_compiled_model_counts_what_an_eager_one_counts(train, engine):
    def wrap(model):
        return torch.compile(model, backend="aot_eager")

    assert_same(train(engine, padded), train(engine, padded, wrap=wrap))


@EVERY
def test_a_non_finite_gate_skips_its_block_alone(train, engine):
    def poisoned(model, step):
        weight = model.base_model.model.model.layers[1].mlp.gate_proj.base_layer.weight
        with torch.no_grad():
            kept = weight[0, 0].item()
            weight[0, 0] = float("nan") if step == 2 else kept
        tiny.sum_loss(model, tiny.tokens(2, 12, seed=step).to(DEVICE))
        with torch.no_grad():
            weight[0, 0] = kept
        # The gates saw NaN; the gradients stay finite, so that the next steps can be looked at.
        yield sum(each.square().sum() for each in tiny.trainable(model))

    state = train(engine, poisoned)[1]
    skipped = {name: value.item() for name, value in state.items() if name.endswith("/skipped")}
    assert sorted(skipped.values()) == [0, 1]
    assert all(torch.isfinite(value.double()).all() for value in state.values())
