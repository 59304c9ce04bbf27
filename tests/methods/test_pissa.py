"""PiSSA: the best approximation of each weight learns, the model starts as it was, and saves for the stock base."""

from __future__ import annotations

import peft
import pytest
import torch
import transformers
from methods.small import llama, tokens
from torch import nn

import nalora
from nalora import methods
from nalora.methods import initial_factors
from nalora.methods.lora import lora_layers
from nalora.methods.method import Adapter, Start

ADAPTER = Adapter(rank=4, alpha=10)


def prepared(dtype=torch.float32, start=None, **options):
    return methods.get("pissa")(**options).prepare(llama(dtype), ADAPTER, start or Start())


def stepped(model, steps=5):
    """Trained a little, so that the adapter is far from its start."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-2)
    for seed in range(steps):
        ids = tokens(seed=seed)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def test_the_model_starts_as_it_was_with_the_best_approximation_learning():
    model, stock, ids = prepared(), llama(), tokens()
    torch.testing.assert_close(model(ids).logits, stock(ids).logits, rtol=0, atol=1e-5)
    layers = list(lora_layers(model))
    assert len(layers) == 14
    for name, layer in layers:
        weight = stock.get_submodule(name.removeprefix("base_model.model.")).weight.double()
        learns = 10 / 4 * layer.lora_B["default"].weight.double() @ layer.lora_A["default"].weight.double()
        # Eckart–Young: no matrix of rank r is nearer than the sum of the other singular values squared.
        left_out = torch.linalg.svdvals(weight)[4:].square().sum()
        torch.testing.assert_close((weight - learns).square().sum(), left_out, rtol=1e-4, atol=0)
        # A and B share the singular values evenly.
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        torch.testing.assert_close(a @ a.T, b.T @ b, rtol=1e-4, atol=1e-5)


def test_the_randomised_decomposition_leaves_out_little_more():
    model, stock = prepared(iterations=16), llama()
    torch.testing.assert_close(model(tokens()).logits, stock(tokens()).logits, rtol=0, atol=1e-5)
    for name, layer in lora_layers(model):
        weight = stock.get_submodule(name.removeprefix("base_model.model.")).weight
        left_out = (weight - layer.get_delta_weight("default")).square().sum()
        best = torch.linalg.svdvals(weight)[4:].square().sum()
        assert 0.9999 < left_out / best < 1.1
    with pytest.raises(nalora.NALoRAError, match="0 or more"):
        prepared(iterations=-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_are_float32_and_learn(dtype):
    model = prepared(dtype)
    learning = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert len(learning) == 28
    assert all("lora_" in name and p.dtype == torch.float32 for name, p in learning.items())
    assert {layer.get_base_layer().weight.dtype for _, layer in lora_layers(model)} == {dtype}
    ids = tokens()
    model(input_ids=ids, labels=ids).loss.backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in learning.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("iterations", [0, 4])
def test_a_resumed_run_starts_from_the_same_bits(tmp_path, dtype, iterations):
    reported = []
    fresh = prepared(
        dtype, Start(seed=1, folder=tmp_path, report=lambda *said: reported.append(said)), iterations=iterations
    )
    assert reported[-1] == ("decomposing weights", 14, 14)
    # Another seed and other iterations would decompose to other bits: these are read, not made again.
    again = prepared(dtype, Start(seed=2, folder=tmp_path, report=lambda *_: pytest.fail("decomposed again")))
    for (name, one), (_, other) in zip(fresh.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(one, other), name
        assert one.requires_grad == other.requires_grad
        assert one.dtype == other.dtype


def test_the_start_of_another_adapter_is_not_taken(tmp_path):
    prepared(start=Start(folder=tmp_path))
    with pytest.raises(nalora.NALoRAError, match="the start of another model"):
        methods.get("pissa")().prepare(llama(), Adapter(rank=3), Start(folder=tmp_path))


def test_what_is_saved_is_the_trained_model_on_the_stock_base(tmp_path):
    model, ids = stepped(prepared()), tokens()
    methods.get("pissa")().save(model, tmp_path / "adapter")
    expected = model(ids).logits
    assert (expected - llama()(ids).logits).abs().max() > 0.1
    loaded = peft.PeftModel.from_pretrained(llama(), tmp_path / "adapter").eval()
    torch.testing.assert_close(loaded(ids).logits, expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(loaded.merge_and_unload()(ids).logits, expected, rtol=0, atol=1e-4)
    generic = peft.PeftConfig.from_pretrained(tmp_path / "adapter")
    assert generic.auto_mapping == {
        "base_model_class": "LlamaForCausalLM", "parent_library": "transformers.models.llama.modeling_llama"
    }  # fmt: skip
    assert generic.r == 8


def test_saving_twice_and_training_on_says_the_same_of_the_base(tmp_path):
    model = stepped(prepared())
    methods.get("pissa")().save(model, tmp_path / "one")
    stepped(model.train())
    methods.get("pissa")().save(model, tmp_path / "two")
    loaded = peft.PeftModel.from_pretrained(llama(), tmp_path / "two").eval()
    torch.testing.assert_close(loaded(tokens()).logits, model(tokens()).logits, rtol=0, atol=1e-4)


def test_weights_that_are_stored_the_other_way_round(tmp_path):
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2, n_positions=32)
    stock = transformers.GPT2LMHeadModel(config).eval()
    ids = tokens()
    before = stock(ids).logits
    stock.save_pretrained(tmp_path / "base")
    adapter = Adapter(rank=3, target_modules=["c_attn", "c_fc", "c_proj"])
    model = methods.get("pissa")().prepare(stock, adapter, Start(folder=tmp_path)).eval()
    torch.testing.assert_close(model(ids).logits, before, rtol=0, atol=1e-5)

    def base():
        return transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "base").eval()

    again = methods.get("pissa")().prepare(base(), adapter, Start(folder=tmp_path))
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)
    model = stepped(model)
    methods.get("pissa")().save(model, tmp_path / "adapter")
    loaded = peft.PeftModel.from_pretrained(base(), tmp_path / "adapter").eval()
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=0, atol=1e-4)


def test_a_quantised_base_is_refused():
    bnb = pytest.importorskip("bitsandbytes")
    model = llama()
    model.is_loaded_in_4bit = True
    attention = model.model.layers[0].self_attn
    quantised = bnb.nn.Linear4bit(16, 16, bias=False, quant_type="nf4", quant_storage=torch.bfloat16)
    quantised.weight = bnb.nn.Params4bit(
        attention.q_proj.weight.data, requires_grad=False, quant_storage=torch.bfloat16
    )
    attention.q_proj = quantised.to("cpu")
    with pytest.raises(nalora.NALoRAError, match="q_proj, a Linear4bit"):
        methods.get("pissa")().prepare(model, Adapter(rank=4, target_modules=["q_proj"]), Start())


def test_a_base_in_whole_numbers_is_refused():
    model = methods.get("lora")().prepare(llama(), ADAPTER, Start())
    _, layer = next(lora_layers(model))
    layer.get_base_layer().weight = nn.Parameter(torch.zeros(16, 16, dtype=torch.int8), requires_grad=False)
    with pytest.raises(nalora.NALoRAError, match="in torch.int8"):
        initial_factors.check_movable_base(model, "pissa")


def test_a_tied_weight_is_refused():
    adapter = Adapter(rank=4, target_modules=["q_proj", "lm_head"])
    with pytest.raises(nalora.NALoRAError, match="lm_head, whose weight is tied"):
        methods.get("pissa")().prepare(llama(tie_word_embeddings=True), adapter, Start())
    methods.get("pissa")().prepare(llama(tie_word_embeddings=False), adapter, Start())


def test_an_embedding_is_refused():
    adapter = Adapter(rank=4, target_modules=["q_proj", "embed_tokens"])
    with pytest.raises(nalora.NALoRAError, match="embed_tokens, a Embedding"):
        methods.get("pissa")().prepare(llama(), adapter, Start())
