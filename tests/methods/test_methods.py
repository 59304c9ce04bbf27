"""The methods of a run: what learns, and that the same seed starts the same adapter."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import transformers

import nalora
from nalora import methods
from nalora.config import PAPER_ARGUMENTS
from nalora.methods.method import Adapter, Start


def base():
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    return transformers.LlamaForCausalLM(config).to(torch.bfloat16)


def learning(model):
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("name", ["lora", "na-lora"])
def test_adapters_are_float32_and_the_same_for_a_seed(name):
    one, same, other = (
        learning(methods.get(name)().prepare(base(), Adapter(rank=4), Start(seed=seed))) for seed in (1, 1, 2)
    )
    assert all("lora_" in each and p.dtype == torch.float32 for each, p in one.items())
    assert all(torch.equal(p, same[each]) for each, p in one.items())
    assert any(not torch.equal(p, other[each]) for each, p in one.items())


def test_full_lets_everything_learn_but_not_a_quantised_model():
    model = methods.get("full")().prepare(base(), Adapter(), Start())
    assert len(learning(model)) == len(list(model.parameters()))
    model.is_quantized = True
    with pytest.raises(nalora.NALoRAError, match="a quantised model"):
        methods.get("full")().prepare(model, Adapter(), Start())


@pytest.mark.parametrize("name", ["lora", "na-lora", "gora", "pissa"])
def test_a_list_of_layers_is_not_adapted_in_part(name):
    adapter = Adapter(rank=2, target_modules=["q_proj", "gate"])
    with pytest.raises(nalora.NALoRAError, match="no layer called gate;.*did you mean gate_proj"):
        methods.get(name)().prepare(base(), adapter, Start())


def test_an_unknown_method_names_the_nearest():
    with pytest.raises(nalora.NALoRAError, match="did you mean na-lora"):
        methods.get("nalora")


CONTROLS = {"na-lora", "na-lora-frozen", "na-lora-mean", "na-lora-off", "na-lora-random", "na-lora-utility"}
# As published where a paper says it, by the number that arXiv gave the paper.
PUBLISHED = {
    "adalora": ("2303.10512", {
        "target_rank": None, "initial_rank": None, "warmup_share": 0.1, "final_share": 0.3, "every": 1, "beta1": 0.85,
        "beta2": 0.85, "orthogonality": 0.5,
    }),
    "block-lora": ("2505.20355", {"ratio": 1.0, "blocks": 2}),
    "dora": ("2402.09353", {}),
    "full": ("–", {"trained_modules": None}),
    "gora": ("2502.12171", {
        "gamma": 0.05, "gradient_batches": 32, "min_rank": 4, "max_rank": 32, "ratio": 16.0, "gradient_memory": 4.0,
    }),
    "lora": ("2106.09685", {}),
    "lora+": ("2402.12354", {"ratio": 16.0}),
    "lora-ga": ("2407.05000", {"gamma": 16.0, "gradient_batches": 8, "gradient_memory": 4.0}),
    "lora-pro": ("2407.18242", {"mode": "efficient"}),
    "lora-scaled": ("control", {
        "like": None, "gate_scale": 1.0, "up_scale": 1.0, "down_scale": 1.0, "mask_mean": 1.0,
    }),
    "pissa": ("2404.02948", {"iterations": 0}),
    "rslora": ("2312.03732", {}),
}  # fmt: skip


def test_methods_have_the_names_and_defaults_that_files_of_runs_rely_on():
    assert set(methods.names()) == {*PUBLISHED, *CONTROLS}
    for name, (paper, defaults) in PUBLISHED.items():
        method = methods.get(name)
        assert method.name == name
        assert method.reference.endswith(paper)
        assert {field.name: field.default for field in dataclasses.fields(method)} == defaults


@pytest.mark.parametrize("name", ["na-lora", "na-lora-off", "na-lora-random"])
def test_a_run_takes_every_setting_of_the_configuration_and_of_the_papers_code(name):
    config = {field.name for field in dataclasses.fields(nalora.NALoRAConfig)}
    options = methods.get(name).options({})
    assert {"on", "kernels", *config, *PAPER_ARGUMENTS} == set(options)
    assert {"on", "kernels", *config} == set(methods.get(name)().settings()) == set(methods.get(name)().defaults())
