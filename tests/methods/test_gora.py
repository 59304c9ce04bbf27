"""GoRA: ranks by the formula, a start that is the gradient's step as far as A can hold it, an ordinary adapter."""

from __future__ import annotations

import logging
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
    wrapped,
)
from gradient_runs import check_that_it_resumes_without_gradients, settings_of
from torch import nn

import nalora
from nalora import methods
from nalora.methods import gora
from nalora.methods.gora import GoRA, compressed_step, drawn_rows, rank_pattern
from nalora.methods.method import Adapter, Start
from nalora.runs.settings import check
from nalora.training.run import train

RANK, ALPHA = 4, 16
FEW = {"gradient_batches": 3, "min_rank": 2, "max_rank": 9}


def uneven(dtype=torch.float32, **settings):
    """Some weights larger than others, so that the ranks differ."""
    model = llama(dtype=dtype, **settings)
    for layer in model.model.layers:
        layer.mlp.gate_proj.weight.data *= 3
        layer.self_attn.q_proj.weight.data *= 0.2
    return model


def prepared(model=None, seed=0, folder=None, **settings):
    model = uneven() if model is None else model
    return GoRA(**FEW | settings).prepare(model, Adapter(RANK, ALPHA), start_on(rows(), seed=seed, folder=folder))


def factors(layer):
    return tuple(getattr(layer, factor)["default"].weight.detach() for factor in ("lora_A", "lora_B"))


def stock_weight(model, name):
    return model.get_submodule(name.removeprefix("base_model.model.")).weight.detach()


def output(model):
    batch = collated(rows())
    return model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits.detach()[batch["labels"] >= 0]


# -- ranks


def expected_ranks(lowest, highest):
    model = uneven(torch.float64)
    gradients = autograd_gradients(model, rows())
    importance = {name: (stock_weight(model, name) * g).abs().mean().item() for name, g in gradients.items()}
    budget = RANK * sum(sum(g.shape) for g in gradients.values())
    shares = {name: each / sum(importance.values()) for name, each in importance.items()}
    asked = {name: math.floor(round(budget * shares[name]) / sum(g.shape)) for name, g in gradients.items()}
    return asked, {name: min(max(rank, lowest), highest) for name, rank in asked.items()}, budget


def test_each_rank_is_the_formulas(caplog):
    asked, expected, budget = expected_ranks(FEW["min_rank"], FEW["max_rank"])
    assert min(asked.values()) < FEW["min_rank"]
    assert max(asked.values()) > FEW["max_rank"]
    with caplog.at_level(logging.INFO, logger="nalora"):
        model = prepared()
    layers = layers_of(model)
    assert {name: layer.r["default"] for name, layer in layers.items()} == expected
    for name, layer in layers.items():
        a, b = factors(layer)
        assert (a.shape[0], b.shape[1]) == (expected[name], expected[name])
        assert layer.scaling["default"] == pytest.approx(ALPHA / math.sqrt(expected[name]))
    learns = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert learns == sum(expected[name] * (each.in_features + each.out_features) for name, each in layers.items())
    (line,) = caplog.messages
    assert f"{learns} parameters: {learns / budget:.3f} of the {budget} of rank 4" in line


def test_no_rank_is_above_a_layers_own():
    model = prepared(max_rank=32, min_rank=13)
    ranks = {name: layer.r["default"] for name, layer in layers_of(model).items()}
    # k and v have 12 outputs.
    assert {rank for name, rank in ranks.items() if "k_proj" in name or "v_proj" in name} == {12}
    assert {rank for name, rank in ranks.items() if "q_proj" in name} == {13}


def test_weights_that_lie_the_other_way_around_are_read_so():
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=48, n_embd=16, n_layer=2, n_head=2, n_positions=32)
    model = transformers.GPT2LMHeadModel(config).eval()
    model.transformer.h[0].mlp.c_fc.weight.data *= 5
    loss_of(model, rows(4)).backward()
    convs = {n: m.weight for n, m in model.named_modules() if type(m).__name__ == "Conv1D"}
    importance = {name: (weight * weight.grad).abs().mean().item() for name, weight in convs.items()}
    budget = RANK * sum(sum(weight.shape) for weight in convs.values())
    expected = {}
    for name, weight in convs.items():
        asked = round(budget * importance[name] / sum(importance.values())) // sum(weight.shape)
        expected[f"base_model.model.{name}"] = min(max(asked, 1), 12)
    method = GoRA(gradient_batches=1, min_rank=1, max_rank=12)
    before = loss_of(model, rows(4)).item()
    model.zero_grad()
    prepared = method.prepare(model, Adapter(RANK, ALPHA), start_on(rows(4)))
    assert {name: layer.r["default"] for name, layer in layers_of(prepared).items()} == expected
    assert len(set(expected.values())) > 2
    assert loss_of(prepared.eval(), rows(4)).item() < before


class Namesakes(nn.Module):
    """Names that end in one another, and one with a dot where another has a letter."""

    def __init__(self):
        super().__init__()
        self.proj, self.xproj = nn.Linear(8, 8), nn.Linear(8, 8)
        self.inner = nn.ModuleDict({"proj": nn.Linear(8, 8), "inner": nn.ModuleDict({"proj": nn.Linear(8, 8)})})
        self.innerxproj = nn.Linear(8, 8)


def test_a_rank_pattern_matches_its_layer_and_no_other():
    names = ["proj", "xproj", "inner.proj", "inner.inner.proj", "innerxproj"]
    for order in (names, names[::-1]):
        ranks = {f"base_model.model.{name}": rank for rank, name in enumerate(order, 1)}
        model = wrapped(Namesakes(), ["proj", "xproj", "innerxproj"], rank_pattern=rank_pattern(ranks), r=8)
        assert {name: layer.r["default"] for name, layer in layers_of(model).items()} == ranks


def test_layer_1_is_not_layer_11():
    model = llama(12, hidden=8)
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and name != "lm_head"]
    ranks = {f"base_model.model.{name}": 1 + number % 4 for number, name in enumerate(names)}
    layers = layers_of(wrapped(model, rank_pattern=rank_pattern(ranks)))
    assert {name: layer.r["default"] for name, layer in layers.items()} == ranks


# -- where it starts


@pytest.mark.parametrize("gamma", [5e-2, 0.3])
def test_a_is_drawn_and_b_is_the_formulas(gamma):
    gradients = autograd_gradients(uneven(torch.float64), rows())
    one, same, other = (layers_of(prepared(seed=seed, gamma=gamma)) for seed in (1, 1, 2))
    for name, layer in one.items():
        a, b = factors(layer)
        n = layer.in_features
        assert a.abs().max() <= 1 / math.sqrt(n)
        assert a.std() == pytest.approx(1 / math.sqrt(3 * n), rel=0.3)
        wide = a.double()
        inverse = torch.linalg.inv(wide @ wide.T + 1e-8 * torch.eye(a.shape[0]).double())
        expected = -(gamma * math.sqrt(n) / ALPHA) * gradients[name] @ wide.T @ inverse
        assert (b - expected).norm() < 1e-4 * expected.norm()
        assert all(torch.equal(x, y) for x, y in zip((a, b), factors(same[name]), strict=True))
        assert not torch.equal(a, factors(other[name])[0])
    shapes = {}
    for name, layer in one.items():
        shapes.setdefault(tuple(factors(layer)[0].shape), []).append(name)
    twins = next(names for names in shapes.values() if len(names) > 1)
    assert not torch.equal(*(factors(one[name])[0] for name in twins[:2]))


def test_the_base_stays_as_it_is_and_only_adapters_learn():
    stock, model = uneven(), prepared()
    for name, layer in layers_of(model).items():
        assert torch.equal(layer.base_layer.weight, stock_weight(stock, name))
    assert all(("lora_" in name) == p.requires_grad for name, p in model.named_parameters())
    ordinary = methods.get("lora")().prepare(uneven(), Adapter(RANK, ALPHA), Start())
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in ordinary.named_parameters()]


@pytest.mark.parametrize("rank", [2, 8])
def test_in_the_mean_over_draws_it_is_gamma_times_the_gradient(rank):
    torch.manual_seed(0)
    gradient, gamma = torch.randn(20, 40) @ torch.diag(torch.linspace(2, 0.1, 40)), 0.05
    shares = []
    for seed in range(600):
        a = drawn_rows("layer", rank, 40, seed)
        b = compressed_step(gradient @ a.T, a, gamma, ALPHA)
        shares.append((ALPHA / math.sqrt(rank) * b @ a).norm() ** 2 / (gamma * gradient.norm()) ** 2)
    shares = torch.stack(shares)
    # A projection onto r of n directions keeps r/n of a square in the mean, which √(n/r) gives back; 3 standard errors.
    assert shares.mean() == pytest.approx(1, abs=3 * shares.std().item() / math.sqrt(600))
    assert 0.02 < shares.std() < 0.6


def test_the_start_lowers_the_loss_by_what_the_gradient_predicts():
    data = rows()
    stock = uneven(torch.float64)
    gradients = autograd_gradients(stock, data)
    before = loss_of(stock.eval(), data).item()
    model = prepared(uneven(torch.float64), gamma=1e-3).eval()
    expected = {name: (gradients[name] * product(layer)).sum().item() for name, layer in layers_of(model).items()}
    assert all(each < 0 for each in expected.values())
    fallen = loss_of(model, data).item() - before
    assert fallen < 0
    assert fallen == pytest.approx(sum(expected.values()), rel=0.05)


def test_on_a_base_in_4_bits(tmp_path):
    model, dense = in_4_bits(uneven(hidden=32), tmp_path)
    before = loss_of(dense, rows()).item()
    quantised, plain = layers_of(four := prepared(model)), layers_of(prepared(dense))
    for name, layer in quantised.items():
        assert layer.r["default"] == plain[name].r["default"]
        torch.testing.assert_close(product(layer), product(plain[name]), rtol=0, atol=1e-4 * product(layer).norm())
    # In training mode: for evaluation on a CPU bitsandbytes packs weights in blocks that these are too small for.
    assert loss_of(four.train(), rows()).item() < before


# -- an ordinary adapter, a run that goes on


def test_the_adapter_loads_on_the_stock_base_and_merges(tmp_path):
    data = rows()
    uneven().save_pretrained(tmp_path / "base")
    stock = lambda: transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()  # noqa: E731
    method = GoRA(**FEW)
    model = method.prepare(stock(), Adapter(RANK, ALPHA), start_on(data))
    train_on(model, data, steps=3)
    trained = output(model)
    method.save(model, tmp_path / "adapter")
    loaded = peft.PeftModel.from_pretrained(stock(), tmp_path / "adapter").eval()
    ranks = {name: layer.r["default"] for name, layer in layers_of(model).items()}
    assert {layer.r["default"] for layer in layers_of(loaded).values()} == {max(ranks.values())}
    assert len(set(ranks.values())) > 3
    assert (trained - output(stock())).abs().max() > 0.05
    torch.testing.assert_close(output(loaded), trained, rtol=0, atol=1e-5)
    torch.testing.assert_close(output(loaded.merge_and_unload()), trained, rtol=0, atol=1e-4)


def test_a_folder_that_knows_the_start_needs_no_batches(tmp_path):
    first = prepared(folder=tmp_path)
    again = GoRA(**FEW).prepare(uneven(), Adapter(RANK, ALPHA), Start(seed=5, folder=tmp_path))
    for (name, one), (same, other) in zip(first.named_parameters(), again.named_parameters(), strict=True):
        assert name == same
        assert torch.equal(one, other)
        assert one.requires_grad == other.requires_grad
    with pytest.raises(nalora.NALoRAError, match="the start of another model"):
        GoRA(**FEW).prepare(llama(1), Adapter(RANK, ALPHA), Start(folder=tmp_path))


def test_settings_out_of_range():
    for setting in ("gamma", "gradient_batches", "min_rank", "ratio", "gradient_memory"):
        with pytest.raises(nalora.NALoRAError, match=f"{setting}: found 0"):
            GoRA(**{setting: 0})
    with pytest.raises(nalora.NALoRAError, match="min_rank: 9: found max_rank: 8"):
        GoRA(min_rank=9, max_rank=8)


def test_resumed_without_the_cache_it_ends_the_same(tmp_path, monkeypatch):
    settings = settings_of(tmp_path, method="gora", min_rank=2)
    check_that_it_resumes_without_gradients(settings, gora, tmp_path, monkeypatch)


def test_b_has_ratio_times_the_learning_rate(tmp_path, monkeypatch):
    import nalora.training.run as module

    monkeypatch.setenv("NALORA_CACHE", str(tmp_path / "cache"))
    made = []
    make = module.make_trainer
    monkeypatch.setattr(module, "make_trainer", lambda *a: made.append(make(*a)) or made[-1])
    train(check(settings_of(tmp_path, method="gora", min_rank=2, ratio=8.0, schedule="constant", warmup=0.0)))
    (trainer,) = made
    names = {id(p): name for name, p in trainer.model.named_parameters()}
    rates = {names[id(p)]: group["lr"] for group in trainer.optimizer.param_groups for p in group["params"]}
    assert len(rates) == len([p for p in trainer.model.parameters() if p.requires_grad])
    assert all(rate == pytest.approx(8e-3 if "lora_B" in name else 1e-3) for name, rate in rates.items())


def test_a_is_drawn_as_lora_draws_it():
    """Uniform within 1/√inputs."""
    drawn = drawn_rows("layer", 64, 400, seed=0)
    assert 0.99 / 20 < drawn.abs().max() <= 1 / 20
    assert drawn.mean().abs() < 1e-3
    assert torch.equal(drawn, drawn_rows("layer", 64, 400, seed=0))
    assert not torch.equal(drawn, drawn_rows("other", 64, 400, seed=0))
