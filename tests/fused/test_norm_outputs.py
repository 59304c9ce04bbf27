"""Outputs of norms are computed again in the backward pass: the same gradients, and one tensor less for each norm."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections import Counter

import pytest
import tiny
import torch
from test_fuse import DEVICE, replaced
from test_fuse import llama as small_llama
from torch import nn

import nalora
from nalora.kernels.fused import norm_outputs
from nalora.kernels.fused.adapters import StepFactors

rms_norm = pytest.importorskip("liger_kernel.transformers.rms_norm")
TOKENS = {"input_ids": tiny.tokens().to(DEVICE), "labels": tiny.tokens().to(DEVICE)}
SIZE = TOKENS["input_ids"].numel() * 32 * 4
NORMS = ("input_layernorm", "post_attention_layernorm")


class OneFunction(torch.autograd.Function):
    """What Liger's function computes and keeps, on any device."""

    @staticmethod
    def forward(ctx, x, weight, eps, *_):
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, scale)
        return x * scale * weight

    @staticmethod
    def backward(ctx, dy):
        x, weight, scale = ctx.saved_tensors
        d, n = dy * weight, x * scale
        return scale * (d - n * (d * n).mean(-1, keepdim=True)), (dy * n).sum((0, 1)), None, None, None, None, None


@pytest.fixture(autouse=True)
def _small_outputs_too(monkeypatch):
    monkeypatch.setattr(norm_outputs, "LEAST_BYTES", 0)
    if torch.device(DEVICE).type == "cpu":
        monkeypatch.setattr(rms_norm, "LigerRMSNormFunction", OneFunction)


def norms(model):
    return [getattr(layer, name) for layer in model.get_base_model().model.layers for name in NORMS]


def llama(norm=None, dtype=torch.float32):
    """A model with Liger's norms in place of its own, or with others."""
    from liger_kernel.transformers.monkey_patch import _patch_rms_norm_module

    model = small_llama(dtype)
    for layer in model.get_base_model().model.layers:
        for name in NORMS:
            if norm is None:
                _patch_rms_norm_module(getattr(layer, name))
            else:
                setattr(layer, name, norm(32, dtype=dtype, device=DEVICE).requires_grad_(False))
            getattr(layer, name).weight.data += torch.linspace(0, 1, 32, device=DEVICE)
    # Otherwise the first norm's input needs no gradient, and nothing is kept of it.
    model.enable_input_require_grads()
    return model


def passed(model, context=contextlib.nullcontext, between=lambda: None):
    """Return the loss, all gradients, and the number of tensors of tokens × hidden size that the pass keeps."""
    kept = {}

    def pack(tensor):
        if tensor.shape[-1:] == (32,) and tensor.numel() == TOKENS["input_ids"].numel() * 32:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), context():
        loss = model(**TOKENS).loss
    count = len(kept)
    kept.clear()
    between()
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return loss.item(), gradients, count


def compared(model, monkeypatch, saved, *args, **options):
    """Compare with a pass that keeps all outputs; it must keep so many tensors more."""
    again = passed(model, *args, **options)
    with monkeypatch.context() as patch:
        patch.setattr(norm_outputs, "LEAST_BYTES", 1 << 60)
        kept = passed(model, *args, **options)
    assert again[0] == kept[0]
    assert again[1].keys() == kept[1].keys()
    for name, gradient in again[1].items():
        assert torch.equal(gradient, kept[1][name]), name
    assert again[2] == kept[2] - saved


def autocast():
    return torch.autocast(DEVICE, torch.bfloat16)


@pytest.mark.parametrize("base", ["keep", "fp8"])
@pytest.mark.parametrize("context", [contextlib.nullcontext, autocast])
@pytest.mark.parametrize("norm", [None, nn.LayerNorm])
def test_gradients_are_the_same_bits_and_a_tensor_per_norm_is_not_kept(norm, context, base, monkeypatch):
    if base == "fp8" and torch.device(DEVICE).type == "cpu":
        from test_compiled_layers import scaled_product

        monkeypatch.setattr(torch, "_scaled_mm", scaled_product)
    model = llama(norm)
    nalora.fuse(model, base=base)
    compared(model, monkeypatch, 4, context)  # two norms in each of two layers


def test_norms_of_several_functions_are_left_alone(monkeypatch):
    """Transformers' own norms keep other tensors than their input: keeping that instead would save nothing."""
    model = small_llama()
    model.enable_input_require_grads()
    nalora.fuse(model)
    compared(model, monkeypatch, 0)


def test_a_norm_that_keeps_a_cast_copy_of_its_input_is_left_alone():
    """Autocast casts for a norm on a GPU: keeping the input as well would save nothing."""
    norm, x = nn.LayerNorm(32), torch.randn(4, 32, dtype=torch.bfloat16, requires_grad=True)
    assert not norm_outputs._is_one_step(x, norm(x.float()))
    assert norm_outputs._is_one_step(x, norm.bfloat16()(x))


def test_trained_norms_are_left_alone(monkeypatch):
    model = llama()
    nalora.fuse(model)
    for norm in norms(model):
        norm.weight.requires_grad_(True)
    compared(model, monkeypatch, 0)


class Noisy(nn.LayerNorm):
    """Not a function of its input and weights."""

    def forward(self, x):
        return super().forward(x) * torch.rand(1, generator=torch.Generator().manual_seed(x.numel())).to(x.device)


def test_norms_that_compute_something_else_are_left_alone(monkeypatch):
    model = llama(Noisy)
    nalora.fuse(model)
    compared(model, monkeypatch, 0)
    other = llama()
    nalora.fuse(other)
    calls = []
    for norm in norms(other):
        norm.forward = lambda x, own=norm.forward: (calls.append(x.shape), own(x))[1]
    compared(other, monkeypatch, 0)
    assert len(calls) == 2 * 4  # not called again


def doubled(module, args, output):
    return output * 2


def doubled_in_place(module, args, output):
    return output.mul_(2)


def doubled_unseen(module, args, output):
    output.data.mul_(2)


@pytest.mark.parametrize("hook", [doubled, doubled_in_place, doubled_unseen])
@pytest.mark.parametrize("when", ["before", "after", "prepended", "global"])
def test_outputs_that_hooks_change_are_kept(hook, when, monkeypatch):
    model = llama()
    if when == "before":
        norms(model)[2].register_forward_hook(hook)
    nalora.fuse(model)
    if when in ("after", "prepended"):
        norms(model)[2].register_forward_hook(hook, prepend=when == "prepended")
    if when == "global":
        chosen = norms(model)[2]
        handle = nn.modules.module.register_module_forward_hook(
            lambda module, args, output: hook(module, args, output) if module is chosen else None
        )
    compared(model, monkeypatch, 0 if when == "global" else 3)
    if when == "global":
        handle.remove()


def test_an_input_that_changes_after_the_norm_is_an_error_and_not_another_gradient():
    """torch raises it for the norm alone, too."""
    model = llama()
    layer = model.get_base_model().model.layers[1]
    nalora.fuse(model)
    inputs = []

    def change(*_):
        inputs[-1].mul_(2)

    layer.input_layernorm.register_forward_pre_hook(lambda _, args: inputs.extend(args))
    layer.self_attn.q_proj.register_forward_pre_hook(change)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(**TOKENS).loss.backward()


def replaced_weights(norm):
    norm.weight = nn.Parameter(3 * norm.weight.data, requires_grad=False)


def other_constant(norm):
    norm.variance_epsilon = 0.5


def rounded_and_back(norm):
    norm.to(torch.bfloat16).float()


@pytest.mark.parametrize("change", [replaced_weights, other_constant, rounded_and_back])
def test_changes_between_the_passes_do_not_matter(change, monkeypatch):
    first, second = llama(), llama()
    nalora.fuse(first)
    again = passed(first, between=lambda: [change(norm) for norm in norms(first)])
    monkeypatch.setattr(norm_outputs, "LEAST_BYTES", 1 << 60)
    nalora.fuse(second)
    kept = passed(second, between=lambda: [change(norm) for norm in norms(second)])
    assert all(torch.equal(gradient, kept[1][name]) for name, gradient in again[1].items())


def test_weights_of_a_functional_call(monkeypatch):
    model = llama()
    nalora.fuse(model)
    weights = {name: 2 * p.detach() for name, p in model.named_parameters() if "layernorm" in name}

    def gradients():
        torch.func.functional_call(model, weights, (), TOKENS).loss.backward()
        found = [p.grad.clone() for p in tiny.trainable(model)]
        model.zero_grad()
        return found

    again = gradients()
    monkeypatch.setattr(norm_outputs, "LEAST_BYTES", 1 << 60)
    assert all(map(torch.equal, again, gradients()))


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant, monkeypatch):
    model = llama()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    nalora.fuse(model)
    compared(model, monkeypatch, 0)


@pytest.mark.parametrize("settings", [{}, {"apply_to": "update"}])
def test_with_nalora_attached(settings, monkeypatch):
    model = llama()
    nalora.fuse(model)
    controller = nalora.attach(model, torch.optim.AdamW(tiny.trainable(model)), **settings)
    compared(model, monkeypatch, 4)
    controller.detach()


@pytest.mark.parametrize(("least", "saved"), [(SIZE, 4), (SIZE + 1, 0)])
def test_small_outputs_are_kept(least, saved, monkeypatch):
    model = llama()
    nalora.fuse(model)
    monkeypatch.setattr(norm_outputs, "LEAST_BYTES", least)
    counts = [passed(model)[2]]
    monkeypatch.setattr(norm_outputs, "LEAST_BYTES", 1 << 60)
    assert counts[0] == passed(model)[2] - saved


def hooks(model):
    hooked = (name.rpartition(".")[2] for name, module in model.named_modules() if module._forward_hooks)
    return Counter(name for name in hooked if "norm" in name)


def test_undo_removes_the_hooks_and_a_copy_trains_without_them(monkeypatch):
    model = llama()
    layers = nalora.fuse(model)
    assert hooks(model) == {"input_layernorm": 2, "post_attention_layernorm": 2, "norm": 1}
    compared(copy.deepcopy(model), monkeypatch, 0)
    layers.undo()
    assert not hooks(model)


def test_nothing_is_kept_alive():
    model = llama()
    nalora.fuse(model)
    passed(model)
    model(**TOKENS)
    gc.collect()
    assert not norm_outputs._origins


def test_modules_of_other_widths_are_not_touched():
    """Norms of single heads, as in Qwen3, feed no linear layer."""
    model = llama()
    for layer in model.get_base_model().model.layers:
        layer.self_attn.q_norm = nn.RMSNorm(8)
    nalora.fuse(model)
    assert "q_norm" not in hooks(model)


def test_a_fuse_that_fails_leaves_no_hook(monkeypatch):
    model = llama()
    before = replaced(model)
    monkeypatch.setattr(StepFactors, "attach", lambda self, model: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        nalora.fuse(model)
    assert not hooks(model)
    assert replaced(model) == before
