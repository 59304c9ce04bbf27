"""Decoder layers that are replayed compute what eager layers do, and what cannot be replayed runs eagerly.

On a CPU a recorder that runs the captured functions again stands in for CUDA graphs: buffers, the order of passes and
the decisions are the same. Where there is a GPU, the graphs themselves are tested.
"""

from __future__ import annotations

import contextlib
import copy
import logging

import pytest
import tiny
import torch

import nalora
from nalora.control import fused_ffn, fused_model
from nalora.kernels.fused import graphed_layers, norm_outputs
from nalora.kernels.fused.replaced_forward import replaced_by
from nalora.kernels.statistics import engines

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
pytest.importorskip("triton")


class Rerun:
    """Runs a captured function again, and writes its results into the tensors of its first run."""

    captures = 0
    replays = 0

    def __init__(self, statistics=()):
        self.statistics = statistics

    @contextlib.contextmanager
    def recording(self):
        """A capture computes nothing, so that it must not add to statistics."""
        type(self).captures += 1
        statistics = self.statistics() if callable(self.statistics) else ()
        before = [tensor.clone() for tensor in statistics]
        yield
        for tensor, value in zip(statistics, before, strict=True):
            tensor.copy_(value)

    def record(self, function):
        results = function()

        def replay():
            type(self).replays += 1
            with torch.no_grad():
                for result, again in zip(results, function(), strict=True):
                    if result is not None:
                        result.detach().copy_(again)

        return replay


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    """Let a model on the CPU be replayed."""
    Rerun.captures = Rerun.replays = 0
    if ON_GPU:
        return
    make = graphed_layers.graph_layers

    def graph_layers(model, factors):
        return make(model, factors, lambda: Rerun(lambda: statistics_of(model.__dict__.get("controller"))))

    monkeypatch.setattr(fused_model, "refuse_unless_graphable", lambda model: None)
    monkeypatch.setattr(fused_model, "graph_layers", graph_layers)
    monkeypatch.setattr(fused_ffn, "graph_layers", graph_layers)


def statistics_of(controller):
    return [tensor for gate in controller._window.gates for tensor in gate.sums] if controller else []


def llama(**options):
    return tiny.llama(torch.float32, ffn=64, layers=3, **options).to(DEVICE)


def batch(seed=0, length=12, padded=False):
    ids = tiny.tokens(length=length, seed=seed).to(DEVICE)
    mask = torch.ones_like(ids)
    if padded:
        mask[::2, -3 - seed % 2 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def train(model, batches, fuse=True, attach=None, micro=1, **options):
    """Return the losses, the adapters, and the fused layers of a training."""
    layers = nalora.fuse(model, cuda_graphs=fuse, **options) if fuse is not None else None
    optimizer = torch.optim.AdamW(tiny.trainable(model), lr=1e-2)
    controller = nalora.attach(model, optimizer, attach) if attach else None
    model.__dict__["controller"] = controller
    losses = []
    for start in range(0, len(batches), micro):
        for each in batches[start : start + micro]:
            loss = model(**each).loss / micro
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, tiny.adapter_state(model), layers


def assert_same(one, other):
    assert one[0] == pytest.approx(other[0], rel=1e-5)
    assert tiny.largest_difference(one[1], other[1]) < 2e-4


@pytest.mark.parametrize(
    "options",
    [{}, {"micro": 3}, {"base": "fp8"}, {"attach": nalora.NALoRAConfig(apply_to="update")}],
    ids=["plain", "accumulated", "fp8", "na-lora"],
)
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_replayed_layers_train_as_eager_ones(options, padded):
    batches = [batch(seed, padded=padded) for seed in range(9)]
    eager = train(llama(), batches, fuse=False, **options)
    assert Rerun.replays == 0
    assert_same(train(llama(), batches, **options), eager)
    if not ON_GPU:
        assert Rerun.captures == 1
        assert Rerun.replays == 2 * 3 * 8  # both directions of three layers, in all passes but the first


def test_outputs_of_norms_are_computed_again_in_a_replay(monkeypatch):
    batches = [batch(seed) for seed in range(5)]
    eager = train(llama(), batches, fuse=None)
    monkeypatch.setattr(norm_outputs, "LEAST_BYTES", 0)
    assert_same(train(llama(), batches), eager)
    assert ON_GPU or Rerun.replays == 2 * 3 * 4


@pytest.mark.skipif(not engines.can_compile(torch.device(DEVICE)), reason="no C++ compiler")
@pytest.mark.parametrize(
    ("options", "autocast"), [({}, True), ({"micro": 3, "attach": nalora.NALoRAConfig(apply_to="update")}, False)]
)
def test_compiled_layers_are_replayed_and_not_compiled_again(options, autocast, graphs):
    batches = [batch(seed, padded=True) for seed in range(9)]
    results = []
    for layers in ({"fuse": False}, {"compile_layers": True}):
        with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
            results.append(train(llama(), batches, **layers, **options))
    (losses, weights, _), (replayed_losses, replayed_weights, layers) = results
    assert replayed_losses == pytest.approx(losses, rel=5e-3 if autocast else 1e-5)
    if not autocast:
        assert tiny.largest_difference(replayed_weights, weights) < 2e-4
    assert "compiled: 3 decoder layers" in str(layers)
    assert "CUDA graphs: 3 decoder layers" in str(layers)
    # For inputs without and with a gradient, as without CUDA graphs.
    assert graphs() == 2
    if not ON_GPU:
        assert Rerun.replays == 2 * 3 * 8


def test_batches_of_several_lengths_have_their_own_graphs():
    batches = [batch(seed, length=length) for seed in range(3) for length in (6, 9, 12)]
    assert_same(train(llama(), batches), train(llama(), batches, fuse=False))
    if not ON_GPU:
        assert Rerun.captures == 3


def test_gradients_of_accumulated_passes_are_not_overwritten():
    model = llama()
    nalora.fuse(model, cuda_graphs=True)
    plain = llama()
    for seed in range(5):
        for trained in (model, plain):
            trained(**batch(seed)).loss.backward()
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        if ours.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6, msg=name)


def warmed(model, passes=3):
    layers = nalora.fuse(model, cuda_graphs=True)
    for seed in range(passes):
        model(**batch(seed)).loss.backward()
    model.zero_grad()
    return layers


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_a_pass_before_the_backward_of_another_runs_eagerly():
    model, plain = llama(), llama()
    warmed(model)
    for trained in (model, plain):
        first, second = trained(**batch(7)).loss, trained(**batch(8)).loss
        (first + 2 * second).backward()
    assert tiny.largest_difference(gradients(model), gradients(plain)) < 1e-4


def test_a_pass_without_a_backward_does_not_stop_the_replays():
    model, plain = llama(), llama()
    warmed(model)
    for trained in (model, plain):
        trained(**batch(7))
        trained(**batch(8)).loss.backward()
    before = Rerun.replays
    model(**batch(9)).loss.backward()
    assert ON_GPU or Rerun.replays == before + 6
    plain(**batch(9)).loss.backward()
    assert tiny.largest_difference(gradients(model), gradients(plain)) < 1e-4


def test_a_second_backward_is_refused():
    model = llama()
    warmed(model)
    loss = model(**batch(7)).loss
    loss.backward(retain_graph=True)
    with pytest.raises(nalora.NALoRAError, match="a second backward pass"):
        loss.backward()


def test_evaluation_caches_and_disabled_adapters_use_the_layers_themselves():
    model, plain = llama(), llama()
    warmed(model)
    before = Rerun.replays
    with torch.no_grad():
        assert torch.allclose(model(**batch(7)).loss, plain(**batch(7)).loss, rtol=1e-5)
        with model.disable_adapter(), plain.disable_adapter():
            assert torch.allclose(model(**batch(7)).loss, plain(**batch(7)).loss, rtol=1e-5)
    assert torch.allclose(model.eval()(**batch(7)).loss, plain.eval()(**batch(7)).loss, rtol=1e-5)
    prompt = batch()["input_ids"][:1]
    options = {"max_new_tokens": 4, "do_sample": False}
    assert torch.equal(model.generate(input_ids=prompt, **options), plain.generate(input_ids=prompt, **options))
    assert Rerun.replays == before


def test_changed_parameters_are_captured_again():
    model, plain = llama(), llama()
    warmed(model)
    for trained in (model, plain):
        for name, parameter in trained.named_parameters():
            if "layers.1" in name and "lora_A" in name:
                parameter.requires_grad_(False)
            if "layers.0" in name and "lora_B" in name:
                parameter.data = parameter.data.clone() * 1.5
        trained.zero_grad()
    for seed in range(4):
        for trained in (model, plain):
            trained.zero_grad()
            trained(**batch(seed)).loss.backward()
        assert tiny.largest_difference(gradients(model), gradients(plain)) < 1e-4


def test_a_trained_input_is_replayed_too():
    model, plain = llama(), llama()
    for trained in (model, plain):
        trained.enable_input_require_grads()
    assert_same(train(model, [batch(s) for s in range(4)]), train(plain, [batch(s) for s in range(4)], fuse=False))


def test_undoing_gives_back_pefts_layers_and_a_copy_has_them():
    model = llama()
    layers = warmed(model)
    assert "CUDA graphs: 3 decoder layers" in str(layers)
    copied = copy.deepcopy(model)
    assert not any(replaced_by(module) for module in copied.modules())
    before = Rerun.replays
    copied(**batch(7)).loss.backward()
    layers.undo()
    model(**batch(7)).loss.backward()
    assert Rerun.replays == before
    assert tiny.largest_difference(gradients(model), gradients(copied)) < 1e-4


class Doubled(torch.nn.Module):
    """A layer that returns a tuple, which no graph is made for."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, hidden_states, **kwargs):
        return (self.layer(hidden_states, **kwargs), None)


def test_layers_that_cannot_be_replayed_run_eagerly_and_are_logged(caplog):
    model, plain = llama(), llama()
    for trained in (model, plain):
        layers = trained.base_model.model.model.layers
        for index, layer in enumerate(layers):
            layers[index] = Doubled(layer)
        # What the decoder makes of the tuple.
        trained.base_model.model.model.forward = lambda input_ids, layers=layers, base=trained, **_: through(
            base, input_ids
        )
    nalora.fuse(model, cuda_graphs=True)
    with caplog.at_level(logging.WARNING, "nalora"):
        for seed in range(3):
            for trained in (model, plain):
                trained.zero_grad()
                trained.base_model.model.model.forward(batch(seed)["input_ids"]).square().mean().backward()
            assert tiny.largest_difference(gradients(model), gradients(plain)) < 1e-4
    assert "returns tuple in place of a tensor" in caplog.text
    assert len(caplog.records) == 1


def through(model, ids):
    """The decoder layers of a model, one after the other."""
    inner = model.base_model.model.model
    hidden = inner.embed_tokens(ids)
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    embeddings = inner.rotary_emb(hidden, positions)
    for layer in inner.layers:
        hidden, _ = layer(hidden, position_embeddings=embeddings)
    return hidden


def test_arguments_that_layers_no_longer_share_are_not_mixed_up():
    """The backward pass of a layer must not read the rotary embedding that another layer wrote."""

    def passed(model, ids, seed, different):
        inner = model.base_model.model.model
        hidden = inner.embed_tokens(ids)
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        embeddings = inner.rotary_emb(hidden, positions)
        for index, layer in enumerate(inner.layers):
            if different and index:
                embeddings = inner.rotary_emb(hidden, positions + seed + 2 * index)
            hidden = layer(hidden, position_embeddings=embeddings)
        return hidden.square().mean()

    model, plain = llama(), llama()
    nalora.fuse(model, cuda_graphs=True)
    for seed in range(6):
        for trained in (model, plain):
            trained.zero_grad()
            passed(trained, batch(seed)["input_ids"], seed, seed > 2).backward()
        assert tiny.largest_difference(gradients(model), gradients(plain)) < 1e-4
    assert ON_GPU or Rerun.replays > 0


def test_gradient_checkpointing_that_is_switched_on_later_is_logged(caplog):
    model, plain = llama(), llama()
    warmed(model)
    for trained in (model, plain):
        trained.gradient_checkpointing_enable({"use_reentrant": False})
        trained.enable_input_require_grads()
    before = Rerun.replays
    with caplog.at_level(logging.WARNING, "nalora"):
        for trained in (model, plain):
            trained.zero_grad()
            trained(**batch(5)).loss.backward()
    assert tiny.largest_difference(gradients(model), gradients(plain)) < 1e-4
    assert "gradient checkpointing are not replayed" in caplog.text
    assert Rerun.replays == before


def test_a_gate_that_a_replay_would_not_observe_is_refused_with_its_option():
    model = llama(target_modules=["gate_proj", "down_proj"])
    nalora.fuse(model, cuda_graphs=True)
    optimizer = torch.optim.AdamW(tiny.trainable(model), lr=1e-2)
    with pytest.raises(nalora.NALoRAError, match="in a replayed layer.* without cuda_graphs"):
        nalora.attach(model, optimizer)


@pytest.mark.skipif(ON_GPU, reason="a model on a GPU is accepted")
def test_a_model_on_a_cpu_is_refused(monkeypatch):
    monkeypatch.undo()
    with pytest.raises(nalora.NALoRAError, match="found a model on cpu"):
        nalora.fuse(llama(), cuda_graphs=True)
