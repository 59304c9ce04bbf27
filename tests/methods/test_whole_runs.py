"""Whole runs with each method: killed and resumed they end with the same bits, split batches learn the same, stock
PEFT loads what they save."""

from __future__ import annotations

import json

import peft
import pytest
import tiny
import torch
import transformers
from safetensors.torch import load_file

import nalora
from nalora import methods
from nalora.models.versions import TUNERS, is_older
from nalora.runs.folder import RunFolder
from nalora.runs.settings import check
from nalora.training.run import train

ELEVEN = [
    {"method": "full"},
    {"method": "lora"},
    {"method": "rslora"},
    {"method": "adalora"},
    {"method": "dora"},
    {"method": "lora+", "ratio": 4},
    {"method": "pissa"},
    {"method": "lora-ga", "gradient_batches": 2},
    {"method": "lora-pro"},
    {"method": "gora", "gradient_batches": 2},
    {"method": "na-lora"},
]
GRALORA = () if is_older("peft", TUNERS["gralora"]) else ("peft/gralora",)
OTHERS = [
    {"method": "lora-pro", "mode": "full"},
    {"method": "block-lora", "blocks": 2, "ratio": 4},
    *({"method": name, "gralora_k": 2} for name in GRALORA),
]
CONTROLS = [{"method": name} for name in methods.names() if name.startswith("na-lora-")] + [
    {"method": "lora-scaled", "gate_scale": 0.5}
]
HOSTS = ({}, {"on": "rslora"}, {"on": "dora"}, {"on": "lora+"}, {"on": "pissa", "iterations": 4},
         {"on": "lora-ga", "gradient_batches": 2}, {"on": "gora", "gradient_batches": 2},
         *({"on": name, "gralora_k": 2} for name in GRALORA))  # fmt: skip


def called(options):
    return "-".join(str(value) for name, value in options.items() if name in ("method", "on", "mode", "apply_to"))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny.saved_llama(tmp_path_factory.mktemp("base"))


@pytest.fixture
def settings(base, tmp_path, monkeypatch):
    monkeypatch.setenv("NALORA_CACHE", str(tmp_path / "cache"))
    return {
        "model": base, "task": "gym/chain_sum", "train_size": 24, "test_size": 4,
        "settings": {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}, "rank": 4,
        "steps": 6, "batch_size": 4, "learning_rate": 1e-3, "device": "cpu", "log_every": 1,
    }  # fmt: skip


def weights(folder):
    found = RunFolder(folder)
    file = found.model / "model.safetensors" if found.model.is_dir() else found.adapter / "adapter_model.safetensors"
    return load_file(file)


def losses(folder):
    return [json.loads(line)["loss"] for line in RunFolder(folder).metrics.read_text().splitlines()]


@pytest.mark.parametrize(
    "options",
    [
        *ELEVEN,
        *OTHERS,
        {"method": "lora-pro", "mode": "full"},
        *({"method": "na-lora", **host} for host in HOSTS if host),
    ],
    ids=called,
)
def test_a_run_killed_and_resumed_is_the_whole_run(settings, tmp_path, options):
    settings = {**settings, "save_every": 3, **options}
    whole, halves = ({**settings, "output": str(tmp_path / name)} for name in ("whole", "halves"))
    train(check(whole))
    train(check(halves))
    folder = RunFolder(halves["output"])
    folder.result.unlink()  # as a kill in the middle of the last checkpoint leaves it
    (folder.checkpoints / "checkpoint-6" / "complete").unlink()
    train(check(halves), resume=True)
    one, other = weights(whole["output"]), weights(halves["output"])
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_a_method_s_start_has_a_folder_of_its_own_and_others_have_none(settings, tmp_path):
    for options in ({"method": "pissa"}, {"method": "gora", "gradient_batches": 2}, {"method": "lora"}):
        place = tmp_path / options["method"]
        train(check({**settings, **options, "output": str(place)}))
        assert not list(place.glob("*.safetensors"))
        kept = [file.name for file in (place / "start").glob("*")]
        assert kept == {"pissa": ["start.safetensors"], "gora": ["gora.safetensors"]}.get(options["method"], [])
        assert (place / "start").is_dir() == bool(kept)


def test_a_run_whose_run_yaml_was_deleted_is_not_trained_over(settings, tmp_path):
    train(check({**settings, "output": str(tmp_path / "run")}))
    folder = RunFolder(tmp_path / "run")
    folder.settings.unlink()
    folder.result.unlink()
    before = weights(folder.path)
    with pytest.raises(nalora.NALoRAError, match="run.yaml is missing"):
        train(check({**settings, "seed": 1, "output": str(tmp_path / "run")}))
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(folder.path).items())


@pytest.mark.parametrize("options", [*ELEVEN, *CONTROLS], ids=called)
def test_stock_libraries_load_what_is_saved_and_merge_it_to_the_same_outputs(settings, tmp_path, options):
    train(check({**settings, **options, "output": str(tmp_path / "run")}))
    folder = RunFolder(tmp_path / "run")
    stock = transformers.AutoModelForCausalLM.from_pretrained(settings["model"]).eval()
    ids = torch.arange(4, 24)[None]
    before = stock(ids).logits.detach()
    if folder.model.is_dir():
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder.model).eval()
        assert (loaded(ids).logits - before).abs().max() > 1e-5
        return
    loaded = peft.PeftModel.from_pretrained(stock, folder.adapter).eval()
    after = loaded(ids).logits.detach()
    assert (after - before).abs().max() > 1e-5
    torch.testing.assert_close(loaded.merge_and_unload()(ids).logits, after, rtol=0, atol=1e-4)


@pytest.mark.parametrize("host", HOSTS, ids=called)
@pytest.mark.parametrize("apply_to", ["gradient", "update"])
def test_na_lora_controls_the_steps_of_the_others(settings, tmp_path, host, apply_to):
    """Controlled, a run ends elsewhere than the method by itself; with both controls off it is that method's."""
    options = {name: value for name, value in host.items() if name != "on"}
    alone = {**settings, "method": host.get("on", "lora"), **options, "optimizer": "sgd", "learning_rate": 0.05}
    on_it = {**alone, "method": "na-lora", **host, "apply_to": apply_to}
    off = {**on_it, "mask": False, "scaling": False}
    for name, each in (("alone", alone), ("controlled", on_it), ("off", off)):
        train(check({**each, "output": str(tmp_path / name)}))
    plain, controlled, uncontrolled = (weights(tmp_path / name) for name in ("alone", "controlled", "off"))
    assert all(torch.equal(tensor, uncontrolled[name]) for name, tensor in plain.items())
    assert any(not torch.equal(tensor, controlled[name]) for name, tensor in plain.items())


@pytest.mark.parametrize("options", ELEVEN, ids=called)
def test_split_batches_and_checkpointing_learn_the_same(settings, tmp_path, options):
    """4 passes of 1 example, with checkpointing, against one pass of 4: rounding apart, the same losses."""
    split = {**settings, **options, "micro_batch_size": 1, "gradient_checkpointing": True}
    train(check({**settings, **options, "output": str(tmp_path / "whole")}))
    train(check({**split, "output": str(tmp_path / "split")}))
    assert losses(tmp_path / "split") == pytest.approx(losses(tmp_path / "whole"), rel=2e-4)


@pytest.mark.parametrize("options", ELEVEN, ids=called)
def test_a_bf16_base_trains(settings, tmp_path, options):
    settings = {**settings, "dtype": "bfloat16", "steps": 30, "batch_size": 8, "learning_rate": 3e-3}
    train(check({**settings, **options, "output": str(tmp_path / "run")}))
    rows = losses(tmp_path / "run")
    assert sum(rows[-5:]) < sum(rows[:5])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "lora", "rank": 64}, "a rank of at most"),
        ({"method": "lora-ga", "rank": 12}, "2r singular vectors"),
        ({"method": "na-lora", "on": "full"}, "no adapter whose steps"),
        ({"method": "na-lora", "on": "adalora"}, "its ranks are allocated"),
        ({"method": "na-lora", "on": "lora-pro"}, "solved for together"),
        ({"method": "na-lora", "on": "na-lora"}, "controlled already"),
        ({"method": "na-lora", "on": "pisa"}, "did you mean pissa"),
        ({"method": "pissa", "iteration": 4}, "did you mean iterations"),
        ({"method": "lora+", "ratio": 0}, "λ > 0"),
    ],
)
def test_what_makes_no_sense_is_refused_before_any_training(settings, tmp_path, options, message):
    with pytest.raises(nalora.NALoRAError, match=message):
        train(check({**settings, **options, "output": str(tmp_path / "run")}))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
