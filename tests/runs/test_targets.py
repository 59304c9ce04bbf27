"""What a command's target is: a run, an adapter from anybody's script, or a model, each by any path to it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import tiny
import torch
import transformers

import nalora
from nalora.models.loading import ModelSpec
from nalora.runs import targets
from nalora.runs.settings import check
from nalora.runs.targets import resolve
from nalora.training.run import train

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A base model, a LoRA run and a fully fine-tuned run of it."""
    place = tmp_path_factory.mktemp("place")
    base = tiny.saved_llama(place / "base", layers=1)
    settings = {
        "model": base, "task": "gym/chain_sum", "train_size": 8, "test_size": 2, "steps": 2, "batch_size": 4,
        "learning_rate": 1e-2, "device": "cpu",
    }  # fmt: skip
    for method in ("lora", "full"):
        train(check({**settings, "method": method, "output": str(place / "runs" / method)}))
    return place


@pytest.fixture
def adapter(place, tmp_path):
    """A copy of the adapter, as somebody's script leaves it: without the run and without a tokenizer."""
    shutil.copytree(place / "runs" / "lora" / "adapter", tmp_path / "adapter")
    for file in (tmp_path / "adapter").glob("token*"):
        file.unlink()
    return tmp_path / "adapter"


def named(folder, base):
    """Let the adapter's config name this base."""
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": base}))


def logits(loaded):
    with torch.no_grad():
        return loaded.model(torch.tensor([[5, 6, 7, 8]])).logits


def test_a_run_on_a_quantised_base_is_evaluated_on_the_one_that_it_names(place, tmp_path):
    for evaluate, expected in ((True, "4bit"), (False, None)):
        folder = tmp_path / str(evaluate)
        shutil.copytree(place / "runs" / "lora", folder)
        run = (folder / "run.yaml").read_text().replace("quantise: null", "quantise: 4bit")
        (folder / "run.yaml").write_text(run.replace("evaluate_quantised: true", f"evaluate_quantised: {evaluate}"))
        assert resolve(str(folder)).spec.quantise == expected
    with pytest.raises(nalora.NALoRAError, match="evaluate_quantised: false without quantise"):
        check({"model": "smollm2-135m", "task": "gym/chain_sum", "evaluate_quantised": False})


def test_a_run_an_adapter_and_a_model_are_told_apart(place, adapter):
    run = resolve(str(place / "runs" / "lora"))
    assert (run.sort, run.trained, run.adapter) == ("run", run.run.trained, run.run.trained)
    assert run.run.run.settings.learning_rate == 1e-2
    assert run.spec == run.run.run.settings.model_spec()
    full = resolve(str(place / "runs" / "full"))
    assert (full.sort, full.adapter, full.trained_spec.name) == ("run", None, str(place / "runs" / "full" / "model"))
    other = resolve(str(adapter), device="cpu")
    assert (other.sort, other.spec, other.adapter, other.run) == (
        "adapter", ModelSpec(str(place / "base"), device="cpu"), adapter, None
    )  # fmt: skip
    model = resolve(str(place / "base"))
    assert (model.sort, model.spec.name, model.trained) == ("model", str(place / "base"), None)
    assert resolve("smollm2-135m").sort == "model"


def test_the_same_adapter_is_the_same_model_by_every_path(place, adapter):
    run = targets.load(resolve(str(place / "runs" / "lora")), with_base=True)
    alone = targets.load(resolve(str(adapter)))
    assert alone.base is None
    assert torch.equal(logits(run.trained), logits(alone.trained))
    base = logits(targets.load(resolve(str(place / "base"))).trained)
    assert torch.equal(logits(run.base), base)
    assert not torch.equal(logits(run.trained), base)
    full = targets.load(resolve(str(place / "runs" / "full")), with_base=True)
    assert torch.equal(logits(full.base), base)
    assert not torch.equal(logits(full.trained), base)


def test_a_run_keeps_its_tokenizer_with_the_adapter(place):
    """And with its chat template, which may be another one than the base model's later."""
    folder = place / "runs" / "lora" / "adapter"
    saved = transformers.AutoTokenizer.from_pretrained(folder)
    assert saved.get_vocab() == tiny.tokenizer().get_vocab()


def test_the_tokenizer_and_the_template_beside_the_adapter_come_first(place, adapter):
    target = resolve(str(adapter))
    assert not targets.load_processor(target).chat_template
    (adapter / "chat_template.jinja").write_text(TEMPLATE)
    assert targets.load_processor(target).chat_template == TEMPLATE
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = "other"
    tokenizer.add_special_tokens({"additional_special_tokens": ["<assistant>"]})
    tokenizer.save_pretrained(adapter)
    processor = targets.load(target).trained.processor
    assert processor.chat_template == "other"
    assert "<assistant>" in processor.get_vocab()
    (adapter / "tokenizer.json").write_text("{")
    with pytest.raises(nalora.NALoRAError, match="adapter"):
        targets.load_processor(target)


@pytest.mark.parametrize("base", ["models/base", "../models/base", "here"])
def test_a_relative_base_is_found_from_where_the_script_was(place, adapter, base, tmp_path, monkeypatch):
    """In a folder above the adapter, next to it, or in the current folder."""
    models = tmp_path / ("here" if base == "here" else "models/base")
    shutil.copytree(place / "base", models)
    named(adapter, base)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(tmp_path if base == "here" else elsewhere)
    assert torch.equal(
        logits(targets.load(resolve(str(adapter))).trained),
        logits(targets.load(resolve(str(place / "runs" / "lora"))).trained),
    )


def test_an_adapter_without_its_base_asks_for_it(place, adapter):
    for base in (None, "/nowhere/base", "./base"):
        named(adapter, base)
        with pytest.raises(nalora.NALoRAError, match=r"--model BASE"):
            resolve(str(adapter))
    assert resolve(str(adapter), model=str(place / "base")).spec.name == str(place / "base")
    named(adapter, "owner/base")
    assert resolve(str(adapter)).spec == ModelSpec("owner/base")


def test_the_adapter_inside_a_run_knows_the_run_s_base(place, tmp_path):
    shutil.copytree(place / "runs" / "lora", tmp_path / "lora")
    named(tmp_path / "lora" / "adapter", "/another/machine/base")
    assert resolve(str(tmp_path / "lora" / "adapter")).spec.name == str(place / "base")


def test_another_base_of_a_run_and_one_that_does_not_fit(place, adapter, tmp_path):
    other = tiny.saved_llama(tmp_path / "wide", layers=1, hidden=64)
    for name in (str(adapter), str(place / "runs" / "lora")):
        with pytest.raises(nalora.NALoRAError, match="an adapter of another model"):
            targets.load(resolve(name, model=other))
    with pytest.raises(nalora.NALoRAError, match="no adapter, and --model"):
        resolve(str(place / "base"), model=other)


def test_names_of_nothing_are_answered_with_what_is_there(place, adapter, tmp_path, monkeypatch):
    monkeypatch.chdir(place)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name, answer in {
        "runs/lorra": "did you mean lora?", "runs": "name one inside it, such as runs/lora",
        "runs/lora/adapterr": "did you mean adapter?", "/nowhere/at/all": "check the path",
        "base/model.safetensors": "a file",
    }.items():  # fmt: skip
        with pytest.raises(nalora.NALoRAError) as refused:
            targets.load(resolve(name))
        assert answer in str(refused.value), name
    for name, answer in {"lora": "did you mean runs/lora?", "smollm2-135": "did you mean smollm2-135m?"}.items():
        with pytest.raises(nalora.NALoRAError, match=answer.replace("?", r"\? Otherwise check")):
            targets.load(resolve(name))
    with pytest.raises(
        nalora.NALoRAError, match=r"did you mean laptop, a recipe that `nalora train laptop` trains\? O"
    ):
        targets.load(resolve("laptp"))
    for step in (9, 10):
        shutil.copytree(adapter, tmp_path / "out" / f"checkpoint-{step}")
    with pytest.raises(nalora.NALoRAError, match="such as .*checkpoint-10"):
        resolve(str(tmp_path / "out"))


def test_an_adapter_on_the_hub_is_its_downloaded_folder(place, adapter, tmp_path, monkeypatch):
    from huggingface_hub import constants

    cache = tmp_path / "cache"
    repository = cache / "models--owner--adapter"
    shutil.copytree(adapter, repository / "snapshots" / ("a" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("transformers.utils.hub.constants.HF_HUB_CACHE", str(cache))
    target = resolve("owner/adapter")
    assert (target.sort, target.adapter.name) == ("adapter", "a" * 40)
    assert torch.equal(logits(targets.load(target).trained), logits(targets.load(resolve(str(adapter))).trained))


def test_code_needs_trust(place, adapter, tmp_path):
    shutil.copytree(place / "runs" / "lora", tmp_path / "lora")
    file = tmp_path / "lora" / "run.yaml"
    file.write_text(file.read_text().replace("trust_remote_code: false", "trust_remote_code: true"))
    with pytest.raises(nalora.NALoRAError, match="--trust"):
        resolve(str(tmp_path / "lora"))
    assert resolve(str(tmp_path / "lora"), trust=True).spec.trust_remote_code
    assert not resolve(str(adapter)).spec.trust_remote_code
    assert resolve(str(adapter), trust=True).spec == replace(resolve(str(adapter)).spec, trust_remote_code=True)
    base = tmp_path / "coded"
    shutil.copytree(place / "base", base)
    config = json.loads((base / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}
    (base / "config.json").write_text(json.dumps(config))
    (base / "own.py").write_text("raise SystemExit('imported')")
    with pytest.raises(nalora.NALoRAError, match="add --trust"):
        targets.load(resolve(str(adapter), model=str(base)))
