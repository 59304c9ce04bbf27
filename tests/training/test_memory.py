"""The memory of a step: computed without values it is that of a real step, byte for byte."""

from __future__ import annotations

import pytest
import tiny
import torch

from nalora.models.loading import ModelSpec, load, load_skeleton
from nalora.training.memory import LiveBytes, estimate

OPTIONS = dict(optimizer="adamw_torch", accumulated=1, autocast=None, checkpointing=False, quantise=None)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny.saved_llama(tmp_path_factory.mktemp("base"), hidden=64)


def adapted(model):
    return tiny.with_lora(model, lora_b=0)


def batch(rows=4, length=32):
    ids = torch.randint(1, 90, (rows, length), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, -1] = 0  # without padding transformers leaves the mask out
    return {"input_ids": ids, "attention_mask": mask, "labels": ids}


def on_meta(base):
    return adapted(load_skeleton(ModelSpec(base, device="cpu")).model)


def test_live_bytes_are_those_of_tensors_that_are_still_referenced():
    known = torch.zeros(1000)
    with LiveBytes().without([known]) as live:
        first = known + 1  # 4,000 bytes
        second = first.view(10, 100) * 2  # a view shares its storage
        del first
        third = second + 1
        del second, third
    assert live.peak == 8_000
    with live:
        kept = known.view(10, 100)
    assert live.peak == 8_000
    assert kept.untyped_storage().nbytes() == 4_000


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_the_estimate_is_the_peak_of_a_real_pass(base, checkpointing, autocast):
    model = adapted(load(ModelSpec(base, device="cpu")).model)
    inner = model.base_model.model
    inner.config.use_cache = False
    if checkpointing:
        inner.gradient_checkpointing_enable({"use_reentrant": False})
        inner.enable_input_require_grads()
    with (
        LiveBytes().without([*model.parameters(), *model.buffers()]) as live,
        torch.autocast("cpu", autocast, enabled=autocast is not None),
    ):
        model(**batch()).loss.backward()
    options = OPTIONS | {"checkpointing": checkpointing, "autocast": autocast}
    memory = estimate(on_meta(base), batch(), **options)
    assert memory.why_unknown == ""
    assert memory.activations + memory.gradients == pytest.approx(live.peak, rel=0.01)


def test_activations_grow_with_the_batch_and_shrink_with_checkpointing(base):
    small, large, recomputed = (
        estimate(on_meta(base), batch(rows), **OPTIONS | {"checkpointing": checkpointing}).activations
        for rows, checkpointing in ((4, False), (16, False), (16, True))
    )
    assert 3 * small < large < 5 * small
    assert recomputed < 0.8 * large


def test_weights_gradients_and_optimizer_state_are_counted_by_their_types(base):
    model = on_meta(base)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in model.parameters()) - trained
    buffers = sum(b.numel() * b.element_size() for b in model.buffers())
    memory = estimate(model, batch(), **OPTIONS)
    assert (memory.frozen, memory.trained) == (4 * frozen + buffers, 4 * trained)
    assert (memory.gradients, memory.optimizer) == (4 * trained, 8 * trained)
    assert memory.total == sum((memory.frozen, *3 * [memory.trained], memory.trained, memory.activations))
    states = {"sgd": 0, "adamw_bnb_8bit": 2, "lion_32bit": 4, "adafactor": 0}
    for name, size in states.items():
        assert estimate(on_meta(base), batch(), **OPTIONS | {"optimizer": name}).optimizer == size * trained


def test_quantised_weights_take_half_a_byte_and_a_scale(base):
    whole, quantised = (
        estimate(on_meta(base), batch(), **OPTIONS | {"quantise": kind}).frozen for kind in (None, "4bit")
    )
    layers = load_skeleton(ModelSpec(base, device="cpu")).model.model.layers
    linear = sum(module.weight.numel() for module in layers.modules() if isinstance(module, torch.nn.Linear))
    assert whole - quantised == pytest.approx(linear * (4 - 0.5625), abs=1)


def test_a_model_that_reads_values_has_an_unknown_estimate_with_the_reason(base):
    model = on_meta(base)
    model.register_forward_pre_hook(lambda module, args, kwargs: kwargs["input_ids"].sum().item(), with_kwargs=True)
    memory = estimate(model, batch(), **OPTIONS)
    assert memory.activations is None
    assert memory.why_unknown
    assert memory.total > memory.frozen
