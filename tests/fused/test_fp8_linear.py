"""A base in FP8 is undone wherever its layers are, moves and loads like other layers, and is never saved in part."""

from __future__ import annotations

import pytest
import tiny
import torch
import transformers
from torch import nn

import nalora
from nalora.kernels.fused.fp8_linear import FP8Linear

pytest.importorskip("triton")


def llama(dtype=torch.float32, **options):
    return tiny.llama(dtype, ffn=64, **options)


def batch():
    ids = tiny.tokens()
    return {"input_ids": ids, "labels": ids}


def test_undoing_after_unload():
    model = llama()
    expected = llama().unload().state_dict()
    layers = nalora.fuse(model, base="fp8", keep_base=True)
    plain = model.unload()
    layers.undo()
    assert not any(isinstance(module, FP8Linear) for module in plain.modules())
    assert all(torch.equal(weight, expected[name]) for name, weight in plain.state_dict().items())
    assert plain.state_dict().keys() == expected.keys()


def test_undoing_in_the_dtype_that_the_model_has_now():
    model = llama()
    layers = nalora.fuse(model, base="fp8", keep_base=True)
    codes = model.base_model.model.model.layers[0].mlp.up_proj.base_layer.codes.clone()
    model.to(torch.bfloat16)
    assert torch.equal(model.base_model.model.model.layers[0].mlp.up_proj.base_layer.codes, codes)
    assert model.base_model.model.model.layers[0].mlp.up_proj.base_layer.weight.dtype is torch.bfloat16
    layers.undo()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    expected = llama().to(torch.bfloat16)
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("keep", [True, False])
def test_a_state_dict_is_loaded_again(keep):
    model = llama()
    full = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    layers = nalora.fuse(model, base="fp8", keep_base=keep)
    loss = model(**batch()).loss
    model.load_state_dict(model.state_dict())
    assert torch.equal(model(**batch()).loss, loss)
    # That of a model that is not in FP8 changes the weights.
    zeros = {name: tensor * 0 if "base_layer" in name else tensor for name, tensor in full.items()}
    model.load_state_dict(zeros)
    layer = model.base_model.model.model.layers[0].mlp.up_proj.base_layer
    assert not layer.weight.any()
    model.load_state_dict(full)
    assert torch.equal(model(**batch()).loss, loss)
    if keep:
        layers.undo()
        assert all(torch.equal(tensor, full[name]) for name, tensor in model.state_dict().items())
    with pytest.raises(RuntimeError, match="shape"):
        layer.load_state_dict({"weight": torch.zeros(2, 2)})


def test_a_base_without_its_weights_is_not_saved(tmp_path):
    model = llama()
    nalora.fuse(model, base="fp8")
    with pytest.raises(nalora.NALoRAError, match="keep_base=True"):
        model.get_base_model().save_pretrained(tmp_path)
    model.save_pretrained(tmp_path / "adapter")
    model = llama()
    layers = nalora.fuse(model, base="fp8", keep_base=True)
    model.get_base_model().save_pretrained(tmp_path / "base")
    layers.undo()


def test_merged_adapters_and_other_dtypes_are_refused():
    model = llama()
    model.merge_adapter()
    before = [type(module) for module in model.modules()]
    with pytest.raises(nalora.NALoRAError, match=r"merged into the weight.*unmerge_adapter"):
        nalora.fuse(model, base="fp8")
    assert [type(module) for module in model.modules()] == before
    for dtype in (torch.float16, torch.float64):
        with pytest.raises(nalora.NALoRAError, match=r"found a weight in float.*bfloat16 or float32"):
            nalora.fuse(llama(dtype), base="fp8")


def test_a_tiny_layer_is_left_and_an_odd_one_refused():
    config = transformers.Qwen2MoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_experts=2, moe_intermediate_size=32, shared_expert_intermediate_size=32,
    )  # fmt: skip
    names = ["q_proj", "gate_proj", "shared_expert_gate"]
    model = tiny.with_lora(transformers.Qwen2MoeForCausalLM(config), target_modules=names)
    layers = nalora.fuse(model, base="fp8")
    assert "base not in FP8: 1 layers: one of its dimensions is below 16" in str(layers)
    with pytest.raises(nalora.NALoRAError, match="expected dimensions that are multiples of 16"):
        nalora.fuse(tiny.llama(torch.float32), base="fp8")


def test_the_layer_without_tokens_and_changed_in_place():
    torch.manual_seed(0)
    layer = FP8Linear(nn.Linear(32, 48).requires_grad_(False))
    for shape in ((0, 32), (2, 0, 32)):
        x = torch.zeros(shape, requires_grad=True)
        y = layer(x)
        assert y.shape == (*shape[:-1], 48)
        y.sum().backward()
    layer.bias = None
    x = torch.randn(2, 3, 32, requires_grad=True)
    y = layer(x)
    y += 1
    y.relu_().sum().backward()
    assert x.grad.any()
