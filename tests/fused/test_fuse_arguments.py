"""What `fuse` refuses, and that a model is unchanged after it failed."""

from __future__ import annotations

import types

import pytest
import tiny
import torch
from torch import nn

import nalora
from nalora.control import fuse_arguments, fused_model
from nalora.kernels.fused import fp8_base, linears
from nalora.kernels.fused.fp8_linear import FP8Linear

pytest.importorskip("triton")


def llama(dtype=torch.float32, **options):
    return tiny.llama(dtype, ffn=64, **options)


def batch():
    ids = tiny.tokens()
    return {"input_ids": ids, "labels": ids}


def state(model):
    """What `fuse` changes."""
    classes = [type(module) for module in model.modules()]
    forwards = [name for name, module in model.named_modules() if vars(module).get("nalora_replacement") is not None]
    weights = {name: parameter.clone() for name, parameter in model.named_parameters()}
    return classes, forwards, weights, len(model._forward_hooks) + len(model._forward_pre_hooks)


def assert_unchanged(model, before):
    classes, forwards, weights, hooks = state(model)
    assert (classes, forwards, hooks) == (before[0], before[1], before[3])
    assert weights.keys() == before[2].keys()
    assert all(torch.equal(weight, before[2][name]) for name, weight in weights.items())


def test_arguments():
    model = llama()
    with pytest.raises(nalora.NALoRAError, match=r"Fix: nalora.fuse\(trainer.model\)"):
        nalora.fuse(types.SimpleNamespace(model=model))
    with pytest.raises(nalora.NALoRAError, match=r"keep_base=True without base='fp8'"):
        nalora.fuse(model, keep_base=True)
    with pytest.raises(nalora.NALoRAError, match="DataParallel"):
        nalora.fuse(nn.DataParallel(model))


def test_sharded_parameters_are_refused_by_name(monkeypatch):
    class Sharded(nn.Parameter):
        pass

    monkeypatch.setattr(fuse_arguments, "DTensor", Sharded)
    model = llama()
    layer = model.base_model.model.model.layers[1].mlp.up_proj.base_layer
    layer.weight = Sharded(layer.weight.data, requires_grad=False)
    with pytest.raises(nalora.NALoRAError, match=r"layers.1.mlp.up_proj.base_layer.weight, which is sharded"):
        nalora.fuse(model)


@pytest.mark.parametrize("part_first", [True, False])
def test_a_part_and_the_whole_are_not_both_fused(part_first):
    model = llama()
    part = model.base_model.model.model.layers[0]
    first, second = (part, model) if part_first else (model, part)
    layers = nalora.fuse(first)
    with pytest.raises(nalora.NALoRAError, match="fused already, as a whole or in part"):
        nalora.fuse(second)
    layers.undo()
    nalora.fuse(second).undo()


@pytest.fixture
def fails_at_the_fifth_layer(monkeypatch):
    made = []

    def make(error):
        def failing(*arguments):
            made.append(1)
            if len(made) == 5:
                raise error
            return FP8Linear(*arguments)

        monkeypatch.setattr(fp8_base, "FP8Linear", failing)

    return make


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError])
def test_a_conversion_that_fails_changes_nothing(fails_at_the_fifth_layer, keep, error):
    model = llama()
    before = state(model)
    fails_at_the_fifth_layer(error)
    with pytest.raises(error):
        nalora.fuse(model, base="fp8", keep_base=keep)
    assert_unchanged(model, before)
    model.merge_and_unload()


def test_a_conversion_without_memory_to_go_back_says_so(monkeypatch, fails_at_the_fifth_layer):
    monkeypatch.setattr(fp8_base, "_has_memory_for", lambda places: False)
    fails_at_the_fifth_layer(torch.OutOfMemoryError)
    with pytest.raises(nalora.NALoRAError, match="load the model again"):
        nalora.fuse(llama(), base="fp8")


@pytest.mark.parametrize("base", ["keep", "fp8"])
def test_an_installation_that_fails_changes_nothing(monkeypatch, base):
    model = llama()
    before = state(model)
    exact, calls = linears.fuse_linears, []

    def failing(*arguments):
        calls.append(1)
        if len(calls) == 15:
            raise KeyboardInterrupt
        return exact(*arguments)

    monkeypatch.setattr(linears, "fuse_linears", failing)
    with pytest.raises(KeyboardInterrupt):
        nalora.fuse(model, base=base)
    assert_unchanged(model, before)
    assert fused_model.fused_layers(model) is None


@pytest.mark.parametrize("call", [1, 2])
def test_a_check_that_fails_leaves_the_fused_layers(call):
    model = llama()
    layers = nalora.fuse(model, base="fp8", keep_base=True)
    before, calls = state(model), []

    def failing(*_):
        calls.append(1)
        if len(calls) == call:
            raise KeyboardInterrupt

    hook = model.base_model.model.model.layers[1].register_forward_pre_hook(failing)
    with pytest.raises(KeyboardInterrupt):
        layers.check(batch())
    hook.remove()
    assert_unchanged(model, before)
    layers.check(batch())


def test_originals_that_do_not_fit_leave_the_fp8_base(monkeypatch):
    model = llama()
    weights = state(model)[2]
    layers = nalora.fuse(model, base="fp8", keep_base=True)
    before, exact = state(model), torch.Tensor.to
    kept = layers._base.converted[4].layer.kept.data_ptr()

    def failing(tensor, *arguments, **options):
        if tensor.data_ptr() == kept:
            raise torch.OutOfMemoryError
        return exact(tensor, *arguments, **options)

    for attempt in (lambda: layers.check(batch()), layers.undo):
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "to", failing)
            with pytest.raises(torch.OutOfMemoryError):
                attempt()
        assert_unchanged(model, before)
    layers.check(batch())
    layers.undo()
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())
