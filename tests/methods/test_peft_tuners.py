"""Tuners of PEFT as methods: their configuration fields are the settings, and PEFT saves what they train."""

from __future__ import annotations

import dataclasses

import peft
import pytest
import torch
from installed import GRALORA, needs
from methods.small import llama, tokens

import nalora
from nalora import methods
from nalora.methods.method import Adapter, Start
from nalora.methods.peft_tuners import tuners
from nalora.runs.settings import RunSettings, check


@pytest.mark.parametrize(
    ("tuner", "settings"),
    [
        pytest.param("gralora", {"gralora_k": 2}, marks=GRALORA),
        ("loha", {}),
        ("lokr", {}),
        pytest.param("hira", {}, marks=needs("peft", "0.20")),
        ("vera", {}),
        ("lora", {"use_rslora": True}),
        ("ia3", {"feedforward_modules": ["down_proj"]}),
        ("oft", {"oft_block_size": 4}),
    ],
)
def test_a_tuner_trains_and_stock_peft_loads_it(tmp_path, tuner, settings):
    method = methods.get(f"peft/{tuner}").build(**settings)
    adapter = Adapter(rank=4, alpha=8, target_modules=["q_proj", "down_proj"])
    model = method.prepare(llama(), adapter, Start())
    learning = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    assert learning
    assert method.trainable_parameters(model) == sum(p.numel() for p in learning.values())
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(2):
        model(input_ids=tokens(), labels=tokens()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert any(not torch.equal(p, learning[name]) for name, p in model.named_parameters() if name in learning)
    method.save(model, tmp_path)
    again = peft.PeftModel.from_pretrained(llama(), str(tmp_path)).eval()
    torch.testing.assert_close(again(input_ids=tokens()).logits, model.eval()(input_ids=tokens()).logits)
    assert again.active_peft_config.peft_type == tuner.upper()
    for name, value in settings.items():
        found = getattr(again.active_peft_config, name)
        assert found == (set(value) if isinstance(value, list) else value)


@GRALORA
def test_the_runs_rank_alpha_and_dropout_are_the_tuners():
    method = methods.get("peft/gralora").build(gralora_k=4)
    config = method.config(Adapter(rank=8, alpha=16.0, dropout=0.1, target_modules=["q_proj"]))
    assert (config.r, config.alpha, config.gralora_dropout, config.gralora_k) == (8, 16, 0.1, 4)
    assert config.target_modules == {"q_proj"}
    plain = methods.get("peft/lora").build().config(Adapter(rank=4, alpha=12.0, target_modules=["q_proj"]))
    assert (plain.r, plain.lora_alpha) == (4, 12)


def test_the_runs_target_parameters_are_loras_and_no_other_tuners():
    adapter = Adapter(target_modules=["q_proj"], target_parameters=["experts.down_proj"])
    assert methods.get("peft/lora")().config(adapter).target_parameters == ["experts.down_proj"]
    with pytest.raises(nalora.NALoRAError, match="whose tuner adapts layers alone"):
        methods.get("peft/loha")().config(adapter)


@GRALORA
def test_the_same_seed_is_the_same_start():
    drawn = [
        methods.get("peft/gralora")().prepare(llama(), Adapter(rank=4), Start(seed=seed)).state_dict()
        for seed in (1, 1, 2)
    ]
    name = next(name for name in drawn[0] if "gralora_A" in name)
    assert torch.equal(drawn[0][name], drawn[1][name])
    assert not torch.equal(drawn[0][name], drawn[2][name])


@GRALORA
def test_a_runs_file_takes_the_fields_and_refuses_others():
    run = check({"model": "m", "task": "gsm8k", "method": "peft/gralora", "gralora_k": 4, "rank": 8})
    assert run.to_dict()["gralora_k"] == 4
    with pytest.raises(nalora.NALoRAError, match="gralora_q: no such setting.*gralora_k"):
        check({"model": "m", "task": "gsm8k", "method": "peft/gralora", "gralora_q": 4})
    with pytest.raises(nalora.NALoRAError, match="gralora_k: 'four', expected a whole number"):
        check({"model": "m", "task": "gsm8k", "method": "peft/gralora", "gralora_k": "four"})


@pytest.mark.parametrize("tuner", sorted(tuners()))
def test_every_tuner_has_settings_that_no_run_has_already(tuner):
    method = methods.get(f"peft/{tuner}")
    own = {field.name for field in dataclasses.fields(RunSettings)}
    assert not own & set(method.options({}))
    assert check({"model": "m", "task": "gsm8k", "method": f"peft/{tuner}"}).method == method()


@pytest.mark.parametrize(
    ("name", "words"),
    [("peft/randlor", "randlora"), ("peft/adalora", "method: adalora"), ("peft/p_tuning", "virtual tokens")],
)
def test_an_unknown_tuner_is_refused_with_what_was_probably_meant(name, words):
    with pytest.raises(nalora.NALoRAError, match=words):
        methods.get(name)


@GRALORA
def test_pefts_own_refusal_is_passed_on_in_one_sentence():
    with pytest.raises(nalora.NALoRAError, match="divisible by gralora_k.*change the setting that PEFT names"):
        methods.get("peft/gralora")(gralora_k=3).prepare(llama(), Adapter(rank=4), Start())


def test_dropout_that_a_tuner_does_not_have_is_refused():
    with pytest.raises(nalora.NALoRAError, match="no ia3_dropout"):
        methods.get("peft/ia3")().prepare(llama(), Adapter(rank=4, dropout=0.1), Start())


def test_na_lora_is_refused_on_every_tuner_but_lora_and_gralora():
    for tuner in tuners():
        run = {"model": "m", "task": "gsm8k", "method": "na-lora", "on": f"peft/{tuner}"}
        if tuner in ("lora", "gralora"):
            assert check(run).method.settings()["on"] == f"peft/{tuner}"
        else:
            with pytest.raises(nalora.NALoRAError, match=f"PEFT's {tuner} has no parameters for.*peft/gralora"):
                check(run)


def test_a_configuration_that_peft_writes_and_does_not_read_again_is_refused():
    """Its adapter would be trained and then not load."""
    method = methods.get("peft/ia3")(feedforward_modules=["mlp.down_proj"])
    with pytest.raises(nalora.NALoRAError, match="feedforward_modules. should be a subset"):
        method.prepare(llama(), Adapter(target_modules="all-linear"), Start())
