"""Outputs of norms are computed again in the backward pass: the same gradients, and one tensor less for each norm."""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from types import MethodType

import pytest
import tiny
import torch
from test_fuse import DEVICE, replaced
from test_fuse import llama as small_llama
from torch import nn

import nalora
from nalora.kernels.fused import norm_outputs
from nalora.kernels.fused.adapters import StepFactors

TOKENS = {"input_ids": tiny.tokens().to(DEVICE), "labels": tiny.tokens().to(DEVICE)}


@pytest.fixture(autouse=True)
def _small_outputs_too(monkeypatch):
    monkeypatch.setattr(norm_outputs, "LEAST_BYTES", 0)


def llama(dtype=torch.float32, norm=None, **options):
    """A model whose norms keep their input: those of transformers in float32, or torch's."""
    model = small_llama(dtype, **options)
    for layer in model.get_base_model().model.layers if norm else ():
        for name in ("input_layernorm", "post_attention_layernorm"):
            other = norm(32, dtype=dtype, device=DEVICE)
            other.weight.data += torch.linspace(0, 1, 32, device=DEVICE)
            setattr(layer, name, other.requires_grad_(False))
    # Otherwise the first norm's input needs no gradient, and nothing is kept of it.
    model.enable_input_require_grads()
    return model


def passed(model, context=contextlib.nullcontext):
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
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return loss.item(), gradients, count


def without(monkeypatch, model, *args):
    """Return the same with outputs that are kept."""
    with monkeypatch.context() as patch:
        patch.setattr(norm_outputs, "LEAST_BYTES", 1 << 60)
        return passed(model, *args)


def assert_equal(one, other):
    assert one[0] == other[0]
    assert one[1].keys() == other[1].keys()
    for name, gradient in one[1].items():
        assert torch.equal(gradient, other[1][name]), name


def autocast():
    return torch.autocast(DEVICE, torch.bfloat16)


@pytest.mark.parametrize("base", ["keep", "fp8"])
@pytest.mark.parametrize("context", [contextlib.nullcontext, autocast])
@pytest.mark.parametrize("norm", [None, nn.RMSNorm, nn.LayerNorm])
def test_gradients_are_the_same_bits_and_a_tensor_per_norm_is_not_kept(norm, context, base, monkeypatch):
    if base == "fp8" and torch.device(DEVICE).type == "cpu":
        from test_compiled_layers import scaled_product

        monkeypatch.setattr(torch, "_scaled_mm", scaled_product)
    model = llama(norm=norm)
    nalora.fuse(model, base=base)
    kept = without(monkeypatch, model, context)
    again = passed(model, context)
    assert_equal(again, kept)
    assert again[2] == kept[2] - 4  # two norms in each of two layers


def test_norms_that_do_not_keep_their_input_are_left_alone(monkeypatch):
    """In bf16 transformers' norms keep a float32 copy: keeping the input instead of the output would save nothing."""
    model = llama(torch.bfloat16)
    nalora.fuse(model)
    assert passed(model)[2] == without(monkeypatch, model)[2]


def test_trained_norms_are_left_alone(monkeypatch):
    model = llama()
    nalora.fuse(model)
    for name, parameter in model.named_parameters():
        if "layernorm" in name:
            parameter.requires_grad_(True)
    kept, again = without(monkeypatch, model), passed(model)
    assert_equal(again, kept)
    assert again[2] == kept[2]


def test_tensors_that_change_after_the_norm_are_not_computed_from(monkeypatch):
    model = llama()
    layer = model.get_base_model().model.layers[1]
    nalora.fuse(model)
    layer.input_layernorm.register_forward_hook(lambda _, args, output: output.mul_(2))
    layer.post_attention_layernorm.register_forward_hook(lambda _, args, output: output + 1)
    kept, again = without(monkeypatch, model), passed(model)
    assert_equal(again, kept)
    assert again[2] == kept[2] - 2  # those of the first layer


def test_an_input_that_changes_after_the_norm_is_an_error_and_not_another_gradient():
    """torch raises it for the norm alone, too."""
    model = llama()
    nalora.fuse(model)
    norm = model.get_base_model().model.layers[1].input_layernorm
    norm.register_forward_hook(lambda _, args, output: (args[0].mul_(2), output)[1])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(**TOKENS).loss.backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant, monkeypatch):
    model = llama(norm=nn.RMSNorm)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    nalora.fuse(model)
    assert_equal(passed(model), without(monkeypatch, model))


@pytest.mark.parametrize("settings", [{}, {"apply_to": "update"}])
def test_with_nalora_attached(settings, monkeypatch):
    model = llama(norm=nn.RMSNorm)
    nalora.fuse(model)
    controller = nalora.attach(model, torch.optim.AdamW(tiny.trainable(model)), **settings)
    kept, again = without(monkeypatch, model), passed(model)
    assert_equal(again, kept)
    assert again[2] == kept[2] - 4
    controller.detach()


def test_small_outputs_are_kept(monkeypatch):
    model = llama()
    nalora.fuse(model)
    size = TOKENS["input_ids"].numel() * 32 * 4
    counts = []
    for least in (size, size + 1):
        monkeypatch.setattr(norm_outputs, "LEAST_BYTES", least)
        counts.append(passed(model)[2])
    assert counts[0] == counts[1] - 4


def test_undo_removes_the_hooks_and_a_copy_has_none_of_them(monkeypatch):
    model = llama()
    layers = nalora.fuse(model)
    assert hooks(model) == {"input_layernorm": 2, "post_attention_layernorm": 2, "norm": 1}
    copied = copy.deepcopy(model)
    assert passed(copied)[2] == without(monkeypatch, copied)[2]
    layers.undo()
    assert not hooks(model)


def hooks(model):
    hooked = (name.rpartition(".")[2] for name, module in model.named_modules() if module._forward_hooks)
    return Counter(name for name in hooked if "norm" in name)


def test_kernels_that_replace_the_norms_later_are_used(monkeypatch):
    """A Trainer applies Liger's kernels after the model was fused, perhaps."""
    model = llama()
    layers = nalora.fuse(model)
    for name, norm in model.named_modules():
        if "layernorm" in name:
            norm.forward = MethodType(lambda self, x: nn.functional.rms_norm(x, (32,), 2 * self.weight), norm)
    kept, again = without(monkeypatch, model), passed(model)
    assert_equal(again, kept)
    assert again[2] == kept[2] - 4
    layers.undo()
    assert passed(model)[0] == pytest.approx(kept[0], rel=1e-5)


def test_norms_of_other_widths_are_not_touched():
    """Norms of single heads, as in Qwen3, feed no linear layer."""
    model = llama()
    for layer in model.get_base_model().model.layers:
        layer.self_attn.q_norm = nn.RMSNorm(8)
    nalora.fuse(model)
    assert "q_norm" not in hooks(model)


def test_a_fuse_that_fails_leaves_no_hook(monkeypatch):
    model = llama()
    monkeypatch.setattr(StepFactors, "attach", lambda self, model: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        nalora.fuse(model)
    assert not hooks(model)
    assert not replaced(model)
