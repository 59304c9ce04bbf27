"""`check` reports everything in which two passes differ, changes nothing, and says what it cannot compare."""

from __future__ import annotations

import math
import types

import pytest
import tiny
import torch
from torch import nn

import nalora
from nalora.control.fused_check import Pass, compare

pytest.importorskip("triton")


def batch():
    ids = tiny.tokens()
    return {"input_ids": ids, "labels": ids}


@pytest.fixture
def model():
    return tiny.llama(torch.float32)


@pytest.mark.parametrize(
    "ours",
    [
        Pass(1.0, {"a": torch.ones(3), "b": torch.full((3,), math.nan)}),
        Pass(1.0, {"a": torch.ones(3), "b": torch.full((3,), math.inf)}),
        Pass(math.nan, {"a": torch.ones(3), "b": torch.ones(3)}),
    ],
)
def test_what_is_not_finite_is_a_disagreement(ours):
    agreement = compare(ours, Pass(1.0, {"a": torch.ones(3), "b": torch.ones(3)}), "PEFT")
    assert math.isnan(agreement.gradients)
    assert math.isnan(agreement.largest)
    assert math.isnan(agreement.lowest_cosine)
    assert "nan" in str(agreement)
    if math.isfinite(ours.loss):
        assert agreement.parameter == "b"


def test_a_batch_without_a_target_is_no_agreement(model):
    labels = torch.full_like(batch()["labels"], -100)
    assert math.isnan(nalora.fuse(model).check(batch() | {"labels": labels}).gradients)


def test_gradients_of_one_pass_alone_are_reported():
    both, one = {"a": torch.ones(3), "b": torch.ones(3)}, {"a": torch.ones(3)}
    for passes in ((both, one), (one, both)):
        agreement = compare(*(Pass(1.0, gradients) for gradients in passes), "PEFT")
        assert agreement.only_in_one == ("b",)
        assert agreement.gradients > 0.5
        assert "one of the two alone: b" in str(agreement)
    assert not compare(Pass(1.0, both), Pass(1.0, both), "PEFT").only_in_one


def test_gradients_that_are_zero_in_both_passes_are_counted(model):
    """Those of A while B is 0, as on a fresh adapter."""
    layers = nalora.fuse(model)
    assert "gradients 0 in both, call check again after a step" not in str(layers.check(batch()))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.zero_()
    agreement = layers.check(batch())
    assert agreement.untested == sum("lora_A" in name for name, _ in model.named_parameters())
    assert f"{agreement.untested} gradients 0 in both, call check again after a step" in str(agreement)


def test_buffers_are_restored():
    class Normalised(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

        def forward(self, x):
            return types.SimpleNamespace(loss=self.norm(self.linear(x)).square().sum())

    model = tiny.with_lora(Normalised(), target_modules=["linear"])
    norm = model.base_model.model.norm
    nalora.fuse(model).check({"x": torch.randn(4, 8)})
    assert norm.num_batches_tracked == 0
    assert not norm.running_mean.any()


def test_what_cannot_be_compared_is_refused(model):
    layers = nalora.fuse(model)
    with torch.no_grad(), pytest.raises(nalora.NALoRAError, match=r"torch.no_grad.*call check outside of it"):
        layers.check(batch())
    with pytest.raises(nalora.NALoRAError, match=r"found a Tensor.*pass a dict"):
        layers.check(batch()["input_ids"])
    with pytest.raises(nalora.NALoRAError, match=r"a tuple.*leave return_dict=False out"):
        layers.check(batch() | {"return_dict": False})
    hooks = [p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None)) for p in tiny.trainable(model)]
    with pytest.raises(nalora.NALoRAError, match="left no gradients"):
        layers.check(batch())
    for hook in hooks:
        hook.remove()
    model.requires_grad_(False)
    with pytest.raises(nalora.NALoRAError, match="without trainable parameters"):
        layers.check(batch())
    model.set_adapter("default")
    layers.undo()
    with pytest.raises(nalora.NALoRAError, match=r"undo\(\) put back.*call fuse"):
        layers.check(batch())
    assert str(layers) == "Fused layers: none, since undo() was called"


def test_dropout_in_compiled_layers_is_noted(model, monkeypatch):
    layers = nalora.fuse(model)
    layers.compiles_layers = True
    monkeypatch.setattr(type(layers), "install", lambda self: None)
    assert "dropout" not in layers.check(batch()).note
    model.base_model.model.model.layers[0].self_attn.attention_dropout = 0.1
    assert "dropout drops other elements" in str(layers.check(batch()))
