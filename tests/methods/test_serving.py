"""Every method's saved adapter means the trained model to a reader that knows one rank and one scaling, as vLLM."""

from __future__ import annotations

import json

import peft
import pytest
import tiny
import tiny_experts
import torch
import transformers
from gradient_models import collated, layers_of, llama, rows, start_on, train_on
from installed import EXPERTS
from served import RefusedError, serve
from torch import nn

from nalora import methods
from nalora.methods.gora import GoRA
from nalora.methods.lora import LoRA, RsLoRA
from nalora.methods.method import Adapter
from nalora.runs.settings import check
from nalora.training.run import train

RANK, ALPHA = 4, 12
SETTINGS = {
    "gora": {"gradient_batches": 2, "min_rank": 2, "max_rank": 9},
    "lora-ga": {"gradient_batches": 2},
    "lora-scaled": {"gate_scale": 0.5},
}
REFUSED = {"dora": "DoRA"}


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    batch = collated(rows())
    found = model.eval()(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return found[batch["attention_mask"] > 0]


def trained(method, model: nn.Module) -> nn.Module:
    data = rows()
    wrapped = method.prepare(model, Adapter(RANK, ALPHA), start_on(data, steps=20))
    train_on(wrapped.train(), data, steps=3)
    return wrapped


def adapters():
    return [name for name in methods.names() if not methods.get(name).trains_the_model]


@pytest.mark.parametrize("name", adapters())
def test_a_server_computes_the_trained_models_logits(name, tmp_path):
    method = methods.get(name).build(**SETTINGS.get(name, {}))
    model = trained(method, llama())
    method.save(model, tmp_path)
    if name in REFUSED:
        with pytest.raises(RefusedError, match=REFUSED[name]):
            serve(llama(), tmp_path)
        return
    expected = logits(model)
    assert (expected - logits(llama())).abs().max() > 0.01
    torch.testing.assert_close(logits(serve(llama(), tmp_path)), expected, rtol=0, atol=2e-5)


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=48, n_embd=16, n_layer=2, n_head=2, n_positions=32, bos_token_id=None, eos_token_id=None,
        initializer_range=0.15,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def qwen3_moe(**settings) -> nn.Module:
    torch.manual_seed(0)
    sizes = dict(
        vocab_size=48, hidden_size=24, intermediate_size=40, moe_intermediate_size=20, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=6, num_experts=4, num_experts_per_tok=2,
        mlp_only_layers=[0], initializer_range=0.15, max_position_embeddings=64, pad_token_id=0,
    )  # fmt: skip
    config = transformers.Qwen3MoeConfig(**sizes | settings)
    return transformers.Qwen3MoeForCausalLM(config)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("method", "make"),
    [
        pytest.param(GoRA(**SETTINGS["gora"]), gpt2, id="GoRA of transposed weights"),
        pytest.param(LoRA(), qwen3_moe, id="LoRA of experts", marks=EXPERTS),
        pytest.param(RsLoRA(), qwen3_moe, id="rsLoRA of experts", marks=EXPERTS),
    ],
)
def test_layers_of_different_ranks_are_saved_with_one(method, make, tmp_path):
    """PEFT gives the fused gate and up of experts twice the rank, and under rsLoRA so another scaling."""
    model = trained(method, make())
    assert len({layer.r["default"] for layer in layers_of(model).values()}) > 1
    method.save(model, tmp_path)
    expected = logits(model)
    assert (expected - logits(make())).abs().max() > 0.01
    torch.testing.assert_close(logits(serve(make(), tmp_path)), expected, rtol=0, atol=2e-5)
    loaded = peft.PeftModel.from_pretrained(make(), tmp_path)
    torch.testing.assert_close(logits(loaded), expected, rtol=0, atol=2e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", ["na-lora", "lora-pro"])
def test_a_run_on_the_dense_layers_of_a_mixture_of_experts(method, tmp_path):
    """Layers that PEFT adapts as parameters are trained, controlled and saved like any other."""
    tokenizer = tiny.tokenizer()
    model = qwen3_moe(vocab_size=len(tokenizer), max_position_embeddings=256)
    model.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    train(check({
        "model": str(tmp_path / "base"), "task": "gym/chain_sum", "train_size": 16, "test_size": 4, "steps": 2,
        "settings": {"min_terms": 2, "max_terms": 2}, "batch_size": 4, "learning_rate": 1e-2, "log_every": 1,
        "device": "cpu", "rank": 4, "method": method, "output": str(tmp_path / "run"),
        "target_modules": ["q_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"],
    }))  # fmt: skip
    if method == "na-lora":
        gates = [json.loads(line) for line in (tmp_path / "run" / "gates.jsonl").read_text().splitlines()]
        assert gates[0]["blocks"] == ["model.layers.0.mlp"]
        assert gates[-1]["mask_mean"][0] < 1
    stock = lambda: transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")  # noqa: E731
    loaded = peft.PeftModel.from_pretrained(stock(), tmp_path / "run" / "adapter")
    adapted = {name for name, layer in layers_of(loaded).items() if layer.lora_B["default"].weight.abs().max() > 0}
    assert "base_model.model.model.layers.0.mlp.gate_proj" in adapted
    assert not any("experts" in name for name in adapted)
    torch.testing.assert_close(logits(serve(stock(), tmp_path / "run" / "adapter")), logits(loaded), rtol=0, atol=2e-5)


@pytest.mark.filterwarnings("ignore")
def test_a_run_on_the_experts_of_gpt_oss(tmp_path):
    """Experts that a run file names as parameters are trained, controlled, saved by PEFT and loaded by it."""
    tokenizer = tiny.tokenizer()
    tiny_experts.base("GptOss", dtype=torch.float32, vocab_size=len(tokenizer)).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    parameters = ["experts.gate_up_proj", "experts.down_proj"]
    train(check({
        "model": str(tmp_path / "base"), "task": "gym/chain_sum", "train_size": 16, "test_size": 4, "steps": 2,
        "settings": {"min_terms": 2, "max_terms": 2}, "batch_size": 4, "learning_rate": 1e-2, "log_every": 1,
        "device": "cpu", "rank": 2, "method": "na-lora", "regimes": "derived", "output": str(tmp_path / "run"),
        "target_modules": [], "target_parameters": parameters,
    }))  # fmt: skip
    gates = [json.loads(line) for line in (tmp_path / "run" / "gates.jsonl").read_text().splitlines()]
    assert gates[0]["blocks"] == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
    assert gates[-1]["mask_mean"][0] < 1
    assert gates[-1]["scale_gate"][0] != 1
    saved = json.loads((tmp_path / "run" / "adapter" / "adapter_config.json").read_text())
    assert sorted(saved["target_parameters"]) == sorted(parameters)
    stock = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    before = logits(stock)
    loaded = peft.PeftModel.from_pretrained(stock, tmp_path / "run" / "adapter")
    assert len(layers_of(loaded)) == 4
    assert (logits(loaded) - before).abs().max() > 1e-4


def test_goras_saved_form_is_padded_and_has_no_patterns(tmp_path):
    method = GoRA(**SETTINGS["gora"])
    model = trained(method, llama())
    ranks = {name: layer.r["default"] for name, layer in layers_of(model).items()}
    largest = max(ranks.values())
    assert len(set(ranks.values())) > 2
    method.save(model, tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (largest, largest, False)
    assert config["rank_pattern"] == config["alpha_pattern"] == {}
    loaded = layers_of(peft.PeftModel.from_pretrained(llama(), tmp_path))
    for name, layer in layers_of(model).items():
        a, b = (getattr(loaded[name], factor)["default"].weight for factor in ("lora_A", "lora_B"))
        assert a.shape[0] == b.shape[1] == largest
        assert torch.equal(a[: ranks[name]], layer.lora_A["default"].weight)
        assert not a[ranks[name] :].any()
        assert not b[:, ranks[name] :].any()
    # The model that is still being trained is left as it is.
    assert {name: layer.r["default"] for name, layer in layers_of(model).items()} == ranks
    assert model.peft_config["default"].rank_pattern


def test_merged_the_weights_are_the_trained_ones(tmp_path):
    method = GoRA(**SETTINGS["gora"])
    model = trained(method, llama())
    method.save(model, tmp_path)
    merged = peft.PeftModel.from_pretrained(llama(), tmp_path).merge_and_unload()
    for name, parameter in model.merge_and_unload().named_parameters():
        torch.testing.assert_close(dict(merged.named_parameters())[name], parameter, rtol=1e-6, atol=1e-6)
