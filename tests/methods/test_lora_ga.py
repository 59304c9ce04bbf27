"""LoRA-GA: where the adapters start, that the model does not move by it, and the first step it was made for."""

from __future__ import annotations

import math

import peft
import pytest
import torch
import transformers
from gradient_models import (
    autograd_gradients,
    collated,
    in_4_bits,
    layers_of,
    llama,
    loss_of,
    product,
    rows,
    start_on,
    train_on,
)
from gradient_runs import check_that_it_resumes_without_gradients, settings_of
from torch import nn

import nalora
from nalora import methods
from nalora.methods import lora_ga
from nalora.methods.lora_ga import LoRAGA, leading_singular_vectors
from nalora.methods.method import Adapter

# k and v of the small Llama have 12 outputs.
RANK, ALPHA = 3, 8


def prepared(model=None, folder=None, **settings):
    model = llama() if model is None else model
    method = LoRAGA(**{"gradient_batches": 3} | settings)
    return method.prepare(model, Adapter(RANK, ALPHA), start_on(rows(), folder=folder))


def output(model):
    batch = collated(rows())
    return model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits.detach()[batch["labels"] >= 0]


@pytest.mark.parametrize("gamma", [16.0, 100.0])
def test_a_and_b_are_the_stated_singular_vectors(gamma):
    gradients = autograd_gradients(llama(dtype=torch.float64), rows())
    layers = layers_of(prepared(gamma=gamma))
    assert layers.keys() == gradients.keys()
    for name, layer in layers.items():
        left, _, right = torch.linalg.svd(gradients[name])
        size = layer.out_features**0.25 / math.sqrt(gamma)
        a, b = (getattr(layer, factor)["default"].weight.detach().double() / size for factor in ("lora_A", "lora_B"))
        eye = torch.eye(RANK, dtype=torch.float64)
        # Each row of A is ±v, each column of B ±u.
        torch.testing.assert_close((a @ right[:RANK].T).abs(), eye, rtol=0, atol=2e-3)
        torch.testing.assert_close((b.T @ left[:, RANK : 2 * RANK]).abs(), eye, rtol=0, atol=2e-3)
        assert a.norm() ** 2 == pytest.approx(RANK, rel=1e-5)
        assert b.norm() ** 2 == pytest.approx(RANK, rel=1e-5)
        assert layer.scaling["default"] == pytest.approx(ALPHA / math.sqrt(RANK))


def test_the_model_computes_what_it_did():
    before = output(llama())
    model = prepared()
    torch.testing.assert_close(output(model), before, rtol=0, atol=1e-5 * before.abs().max().item())
    # Not because nothing was added: the start is as large as the weights.
    stock = llama()
    for name, layer in layers_of(model).items():
        weight = stock.get_submodule(name.removeprefix("base_model.model.")).weight
        assert product(layer).norm() > 0.2 * weight.norm()
        torch.testing.assert_close(layer.base_layer.weight, weight - product(layer), rtol=0, atol=1e-6)


def test_on_a_bfloat16_base_it_moves_by_no_more_than_its_rounding():
    before = output(llama(dtype=torch.bfloat16)).float()
    after = output(prepared(llama(dtype=torch.bfloat16))).float()
    moved = (after - before).norm() / before.norm()
    # Measured 0.015; what computing in bfloat16 at all moves is 0.010.
    assert moved < 0.03


def test_the_first_step_of_sgd_is_the_gradients_best_of_rank_2r():
    data = rows()
    gradients = autograd_gradients(llama(dtype=torch.float64), data)
    model = prepared(llama(dtype=torch.float64)).eval()
    layers = layers_of(model)
    before = {name: product(layer) for name, layer in layers.items()}
    rate = 1e-7
    loss_of(model, data).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter -= rate * parameter.grad
    for name, layer in layers.items():
        left, values, right = torch.linalg.svd(gradients[name], full_matrices=False)
        best = (left[:, : 2 * RANK] * values[: 2 * RANK]) @ right[: 2 * RANK]
        # −η·s²·(√m/γ) × the truncated gradient: how many times is known too.
        factor = -rate * layer.scaling["default"] ** 2 * math.sqrt(layer.out_features) / 16
        change = product(layer) - before[name]
        assert (change - factor * best).norm() < 1e-3 * (factor * best).norm(), name


def test_the_adapter_loads_on_the_stock_base(tmp_path):
    data = rows()
    llama().save_pretrained(tmp_path / "base")
    method = LoRAGA(gradient_batches=3)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model = method.prepare(model, Adapter(RANK, ALPHA), start_on(data)).eval()
    train_on(model, data, steps=5)
    trained = output(model)
    method.save(model, tmp_path / "adapter")
    stock = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
    untrained = output(stock)
    loaded = peft.PeftModel.from_pretrained(stock, tmp_path / "adapter").eval()
    scale = trained.abs().max().item()
    assert (trained - untrained).abs().max() > 0.05 * scale
    torch.testing.assert_close(output(loaded), trained, rtol=0, atol=1e-4 * scale)
    torch.testing.assert_close(output(loaded.merge_and_unload()), trained, rtol=0, atol=1e-4 * scale)


# -- the decomposition


@pytest.mark.parametrize("shape", [(96, 160), (160, 96)])
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("power", [-0.5, -1.0])
def test_leading_singular_vectors_of_a_known_matrix(shape, exact, power, monkeypatch):
    monkeypatch.setattr(lora_ga, "EXACT", 1024 if exact else 0)
    torch.manual_seed(1)
    left, right = (torch.linalg.qr(torch.randn(size, 96, dtype=torch.float64)).Q for size in shape)
    values = torch.arange(1, 97, dtype=torch.float64) ** power
    matrix = (left * values) @ right.T
    state = torch.get_rng_state()
    u, v = leading_singular_vectors(matrix.float(), 8)
    assert torch.equal(torch.get_rng_state(), state)
    assert u.shape == (shape[0], 8)
    assert v.shape == (shape[1], 8)
    # Vectors to 1e-4, and each pair with the same sign.
    torch.testing.assert_close((left[:, :8] * u.double()).sum(0).abs(), torch.ones(8).double(), rtol=0, atol=1e-5)
    torch.testing.assert_close(torch.diagonal(u.double().T @ matrix @ v.double()), values[:8], rtol=1e-4, atol=0)
    # What LoRA-GA makes of them: the truncated matrix.
    best = (left[:, :8] * values[:8]) @ right[:, :8].T
    u, v = u.double(), v.double()
    step = u[:, 4:] @ (u[:, 4:].T @ matrix) + matrix @ v[:, :4] @ v[:, :4].T
    assert (step - best).norm() < 1e-4 * best.norm()


def test_a_matrix_without_a_leading_direction_is_still_cut_almost_best():
    torch.manual_seed(1)
    matrix = torch.randn(1100, 1200)
    u, v = leading_singular_vectors(matrix, 8)
    best = torch.linalg.svdvals(matrix)[:8].norm()
    step = u[:, 4:] @ (u[:, 4:].T @ matrix) + matrix @ v[:, :4] @ v[:, :4].T
    assert step.norm() > 0.97 * best


# -- what is refused, and what a run does


def test_a_rank_above_half_a_layers_own():
    with pytest.raises(nalora.NALoRAError, match="at most 6: LoRA-GA starts from 2r singular vectors"):
        LoRAGA().prepare(llama(), Adapter(7, ALPHA), start_on(rows()))


def test_a_quantised_base_is_refused(tmp_path):
    model, _ = in_4_bits(llama(hidden=32), tmp_path)
    with pytest.raises(nalora.NALoRAError, match="not quantised"):
        prepared(model)


@pytest.mark.parametrize("setting", ["gamma", "gradient_batches", "gradient_memory"])
def test_settings_are_positive(setting):
    with pytest.raises(nalora.NALoRAError, match=f"{setting}: found 0"):
        LoRAGA(**{setting: 0})


def test_na_lora_can_be_combined_with_it():
    method = methods.get("na-lora").build(on="lora-ga", gamma=9.0)
    assert isinstance(method.prepare(llama(), Adapter(RANK), start_on(rows(8), 1)), nn.Module)
    assert method.settings()["gamma"] == 9.0


def test_resumed_without_the_cache_it_ends_the_same(tmp_path, monkeypatch):
    check_that_it_resumes_without_gradients(settings_of(tmp_path, method="lora-ga"), lora_ga, tmp_path, monkeypatch)
