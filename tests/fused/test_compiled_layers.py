"""`nalora.fuse(model, compile_layers=True)`: PEFT's training, one graph for all layers, undone, refused by name."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import tiny
import torch
import transformers
from test_fuse import DEVICE, batch, llama, replaced, train
from torch import nn

import nalora
from nalora.control import fused_check
from nalora.kernels.fused import adapters, compiled_layers, ffn_op, linears_op
from nalora.kernels.statistics import engines

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(not engines.can_compile(torch.device("cpu")), reason="no C++ compiler")


@pytest.mark.parametrize("rank", [4, 40])
def test_training_is_that_of_pefts_layers(rank, graphs):
    plain, compiled = (llama(r=rank) for _ in range(2))
    layers = nalora.fuse(compiled, compile_layers=True)
    assert "compiled: 2 decoder layers" in str(layers)
    (losses, weights), (compiled_losses, compiled_weights) = (train(model, steps=2) for model in (plain, compiled))
    assert compiled_losses == pytest.approx(losses, rel=1e-5)
    assert tiny.largest_difference(weights, compiled_weights) < 2e-5
    # The input of the first layer needs no gradient; the layers after it share a graph.
    assert 1 <= graphs() <= 2


def scaled_product(x, weight, *, scale_a, scale_b, out_dtype, **_):
    """FP8 products with a scale for each row and column, which torch 2.11 does not have on a CPU."""
    return (x.float() * scale_a @ (weight.float() * scale_b)).to(out_dtype)


@pytest.mark.parametrize("options", [{}, {"base": "fp8"}, {"dtype": torch.bfloat16}, {"lora_dropout": 0.5}])
def test_the_number_of_compilations_does_not_depend_on_the_number_of_layers(options, graphs, monkeypatch):
    """torch gives up at 8 compilations of a function."""
    if torch.device(DEVICE).type == "cpu":
        monkeypatch.setattr(torch, "_scaled_mm", scaled_product)
    base = options.get("base", "keep")
    model = llama(layers=12, **{name: value for name, value in options.items() if name != "base"})
    nalora.fuse(model, base=base, compile_layers=True)
    for _ in range(2):
        model(**batch()).loss.backward()
    assert graphs() == 2


def test_batches_of_other_lengths_do_not_exhaust_the_compiler(graphs):
    plain, compiled = (llama() for _ in range(2))
    nalora.fuse(compiled, compile_layers=True)
    ids = batch()["input_ids"]
    for length in (4, 5, 6, 7):
        part = {"input_ids": ids[:, :length], "labels": ids[:, :length]}
        passes = (fused_check.loss_and_gradients(model, part) for model in (compiled, plain))
        assert fused_check.compare(*passes, "PEFT's layers").gradients < 1e-5
    # One for the first length and one for all others, for inputs without and with a gradient.
    assert graphs() <= 4


def test_the_fused_functions_are_operators_of_the_graph(graphs, monkeypatch):
    calls = []
    for module, name in ((linears_op, "linears_forward"), (linears_op, "linears_backward"), (ffn_op, "ffn_forward"),
                         (ffn_op, "ffn_backward")):  # fmt: skip
        exact = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *args, n=name, f=exact, **kwargs: (calls.append(n), f(*args, **kwargs))[1]
        )
    model = llama()
    nalora.fuse(model, compile_layers=True)
    model(**batch()).loss.backward()
    # In each of two layers: query, key and value together, the output, the FFN.
    expected = {"linears_forward": 4, "linears_backward": 4, "ffn_forward": 2, "ffn_backward": 2}
    assert {name: calls.count(name) for name in expected} == expected


def test_outputs_of_norms_are_not_kept(graphs):
    """Of tokens × hidden size a layer keeps what its two norms read, and the model what its last norm reads."""
    model, kept = llama(layers=3), {}
    model.enable_input_require_grads()
    nalora.fuse(model, compile_layers=True)

    def pack(tensor):
        if tensor.numel() == batch()["input_ids"].numel() * 32 and tensor.dim() == 3:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(**batch()).loss
    assert len(kept) == 3 * 2 + 1
    loss.backward()


def test_adapters_are_cast_in_the_forward_pass_alone(graphs, monkeypatch):
    """The compiler keeps what an operator returns; casts that it saw it would repeat in the backward pass."""
    calls, exact = [], adapters.cast
    monkeypatch.setattr(adapters, "cast", lambda groups, dtype: (calls.append(len(groups)), exact(groups, dtype))[1])
    model = llama()
    nalora.fuse(model, compile_layers=True)
    loss = model(**batch()).loss
    # In each of two layers: query, key and value together, the output, the two groups of the FFN together.
    assert calls == [1, 1, 2] * 2
    loss.backward()
    assert len(calls) == 6


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_is_around_the_compiled_layers(reentrant, graphs):
    plain, compiled = (llama() for _ in range(2))
    for model in (plain, compiled):
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    nalora.fuse(compiled, compile_layers=True)
    (losses, weights), (compiled_losses, compiled_weights) = (train(model, steps=2) for model in (plain, compiled))
    assert compiled_losses == pytest.approx(losses, rel=1e-5)
    assert tiny.largest_difference(weights, compiled_weights) < 2e-5
    assert graphs() >= 1


def test_a_base_in_fp8(graphs):
    plain, compiled = (llama() for _ in range(2))
    nalora.fuse(plain, base="fp8")
    nalora.fuse(compiled, base="fp8", compile_layers=True)
    (losses, weights), (compiled_losses, compiled_weights) = (train(model, steps=2) for model in (plain, compiled))
    # A last bit of a norm may change the rounding of a number to three bits.
    assert compiled_losses == pytest.approx(losses, rel=1e-3)
    for name, weight in weights.items():
        assert torch.nn.functional.cosine_similarity(weight.flatten(), compiled_weights[name].flatten(), 0) > 0.999
    assert graphs() >= 1


def test_layers_with_a_bias_and_layers_left_to_peft(graphs):
    """Qwen2's query, key and value have a bias; dropout is PEFT's own forward inside the graph."""
    config = transformers.Qwen2Config(
        vocab_size=tiny.VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, initializer_range=0.1, pad_token_id=0,
    )  # fmt: skip
    model = tiny.with_lora(transformers.Qwen2ForCausalLM(config))
    for layer in model.get_base_model().model.layers:
        nn.init.normal_(layer.self_attn.q_proj.base_layer.bias)
    agreement = nalora.fuse(model, compile_layers=True).check(batch())
    assert agreement.gradients < 1e-5
    assert agreement.loss == pytest.approx(agreement.reference_loss, rel=1e-6)
    dropout = llama(lora_dropout=0.5)
    nalora.fuse(dropout, compile_layers=True)
    dropout(**batch()).loss.backward()
    assert graphs() >= 2


def test_it_is_undone_and_not_copied(graphs):
    model = llama()
    layers = nalora.fuse(model, compile_layers=True)
    assert len(replaced(model)) == 2 * (1 + 7 + 1)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other(**batch()).loss.backward()
        q_proj = other.get_base_model().model.layers[0].self_attn.q_proj
        assert inspect.signature(q_proj.forward) == inspect.signature(type(q_proj).forward.__get__(q_proj))
    assert graphs() == 0
    layers.undo()
    assert not replaced(model)
    assert not model._forward_pre_hooks
    train(model, steps=1)
    assert graphs() == 0


def test_evaluation_and_generation_are_not_compiled(graphs):
    model = llama()
    expected = model.eval().generate(input_ids=batch()["input_ids"][:1], max_new_tokens=3, do_sample=False)
    nalora.fuse(model, compile_layers=True)
    generated = model.generate(input_ids=batch()["input_ids"][:1], max_new_tokens=3, do_sample=False)
    assert torch.equal(generated, expected)
    model.train()
    with torch.no_grad():
        model(**batch())
    assert graphs() == 0


def test_what_cannot_be_compiled_is_refused_by_name(monkeypatch, graphs):
    def refused(model, match):
        with pytest.raises(nalora.NALoRAError, match=match):
            nalora.fuse(model, compile_layers=True)
        assert not replaced(model)

    refused(tiny.with_lora(nn.Sequential(nn.Linear(32, 32)), ["0"], lora_b=0), "without a list of layers")
    model = llama()
    model.get_base_model().model.layers[1].mlp.register_forward_hook(lambda *_: None)
    refused(model, r"layers.1.mlp: found a hook \(<lambda>\)")
    model = llama()
    monkeypatch.setattr(compiled_layers, "is_stored_in_tensors", lambda base: False)
    refused(model, "layers.0.self_attn.q_proj: found a weight in 4 bits")
    monkeypatch.undo()
    monkeypatch.setattr(compiled_layers, "can_compile", lambda device: False)
    refused(model, "no C\\+\\+ compiler")


def test_a_forward_that_depends_on_data_is_an_error_with_a_fix(graphs):
    model = llama()
    mlp = model.get_base_model().model.layers[0].mlp
    nalora.fuse(model, compile_layers=True)
    plain = mlp.forward
    mlp.forward = lambda x: plain(x) if x.sum().item() > 0 else plain(-x)
    with pytest.raises(nalora.NALoRAError, match=r"layers\.0: found a layer that cannot be compiled"):
        model(**batch())


@torch._dynamo.config.patch(recompile_limit=2)
def test_more_graphs_than_torch_allows_are_an_error_with_a_fix(graphs):
    """A graph is made for every combination of ranks and scalings."""
    model = llama()
    nalora.fuse(model, compile_layers=True)
    model(**batch()).loss.backward()
    model.get_base_model().model.layers[1].self_attn.q_proj.scaling["default"] = 5.0
    with pytest.raises(nalora.NALoRAError, match=r"layers\.1: found a layer for which .* at its limit, 2 graphs"):
        model(**batch())


def test_bf16_autocast_computes_gradients_of_adapters_in_float32(graphs):
    """Attention alone: Triton's interpreter multiplies bf16 as integers."""
    model = llama(target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    layers = nalora.fuse(model, compile_layers=True)
    with torch.autocast(tiny.trainable(model)[0].device.type, torch.bfloat16):
        agreement = layers.check(batch())
    assert agreement.loss == pytest.approx(agreement.reference_loss, rel=5e-3)
    assert agreement.lowest_cosine > 0.999
    model(**batch()).loss.backward()
    assert {parameter.grad.dtype for parameter in tiny.trainable(model)} == {torch.float32}
    assert graphs() >= 1


def test_the_operators_describe_themselves_correctly():
    """Shapes without values, gradients and functionalisation, as torch.library checks them."""
    device = tiny.trainable(llama())[0].device
    a, b = ([torch.randn(*shape, device=device, requires_grad=True) for shape in shapes]
            for shapes in (((4, 32), (3, 32)), ((16, 4), (48, 3))))  # fmt: skip
    frozen = [torch.randn(16, 32, device=device), torch.randn(16, device=device), torch.randn(48, 32, device=device)]
    x = torch.randn(2, 5, 32, device=device, requires_grad=True)
    factors = [torch.cat(a).detach(), *(factor.detach() for factor in b)]
    torch.library.opcheck(torch.ops.nalora.lora_linears.default, (x, frozen, factors[0], factors[1:], a, b, [2.0, 0.5]))
    shapes = (((4, 32), (4, 32), (4, 48)), ((48, 4), (48, 4), (32, 4)), ((48, 32), (48, 32), (32, 48)))
    a, b, frozen = ([torch.randn(*shape, device=device) for shape in group] for group in shapes)
    for factor in (*a, *b):
        factor.requires_grad_()
    factors = [factor.detach() for factor in (torch.cat(a[:2]), *b[:2], a[2], b[2])]
    arguments = (x, frozen, factors, a, b, [2.0, 0.5, 1.0], 0, float("inf"), 0.0, None)
    torch.library.opcheck(torch.ops.nalora.lora_ffn.default, arguments)
    plain = ([factor.detach() for factor in each] for each in (a, b))
    torch.library.opcheck(torch.ops.nalora.cast_adapters.default, (*plain, [2.0, 0.5, 1.0], [2, 1], torch.bfloat16))
