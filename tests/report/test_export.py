"""Exported folders are complete, load with the code on their card, and compute what was trained."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path

import peft
import pytest
import torch
import transformers
from exported_models import byte_level, model_for

import nalora
from nalora.evaluation.targets import Request, evaluate_target
from nalora.methods import merging
from nalora.models import loading
from nalora.report import export as exporting
from nalora.report.export import export
from nalora.runs import targets
from nalora.runs.settings import check
from nalora.training.run import train

FORMS = ("peft", "merged", "gguf", "vllm")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    tokenizer = byte_level("llama-bpe", bos=True)
    model_for("llama", 448, intermediate_size=128).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def run(base, tmp_path_factory):
    """A run with a chosen rank, evaluated."""
    folder = tmp_path_factory.mktemp("run") / "run"
    train(check({
        "model": str(base), "task": "gym/chain_sum", "train_size": 16, "test_size": 4, "max_new_tokens": 2, "steps": 3,
        "batch_size": 4, "learning_rate": 0.05, "device": "cpu", "method": "rslora", "rank": 3, "output": str(folder),
    }))  # fmt: skip
    evaluate_target(str(folder), Request(limit=None), device="cpu")
    return folder


@pytest.fixture(scope="module")
def exported(run, tmp_path_factory):
    place = tmp_path_factory.mktemp("exported")
    target = targets.resolve(str(run))
    return {form: export(target, form, place / form) for form in FORMS}


def blocks(folder: Path, language: str) -> list[str]:
    card = (folder / "README.md").read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", card, re.DOTALL)


def adapted(run):
    return targets.load(targets.resolve(str(run), device="cpu")).trained


@pytest.mark.parametrize("form", ["peft", "merged", "vllm"])
def test_the_code_on_the_card_loads_the_trained_model(form, exported, run, monkeypatch, capsys):
    (code,) = blocks(exported[form].folder, "python")
    monkeypatch.chdir(exported[form].folder)
    names: dict = {}
    exec(code, names)
    assert capsys.readouterr().out.strip()
    trained = adapted(run)
    expected = merging.answer(trained.model, trained.processor)
    agreement = merging.compare(expected, merging.answer(names["model"].eval(), names["tokenizer"]), torch.float32)
    assert agreement.holds
    assert agreement.same == agreement.tokens
    assert isinstance(names["model"], peft.PeftModel) == (form != "merged")
    assert names["tokenizer"].chat_template == trained.processor.chat_template


def test_the_gguf_file_has_the_merged_weights(exported, run):
    folder = exported["gguf"].folder
    (file,) = folder.glob("*.gguf")
    compile(blocks(folder, "python")[0], "card", "exec")
    assert f"Llama({file.name!r}" in blocks(folder, "python")[0]
    read = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=file.name, dtype=torch.float32)
    merged = merging.merge(adapted(run).model, torch.float32).state_dict()
    for name, weight in read.state_dict().items():
        torch.testing.assert_close(weight, merged[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("form", FORMS)
def test_the_card_states_base_method_settings_and_results(form, exported, base):
    card = (exported[form].folder / "README.md").read_text(encoding="utf-8")
    assert f"- Base model: `{base}`" in card
    assert "- Data: `gym/chain_sum`" in card
    assert "(`rslora`)" in card
    assert "| `rank` | 3 |" in card
    assert "| `learning_rate` | 0.05 |" in card
    assert "| `alpha` | 16.0 |\n| `target_modules` | all-linear |" in card
    assert "`dropout`" not in card, "a setting that was not chosen"
    assert "messages" not in card, "the run's prompts are plain, whatever the tokenizer has"
    rows = re.findall(r"\| gym/chain_sum \| (base|this) model \| accuracy \| \S+ \| \S+ … \S+ \| 4 \|", card)
    assert rows == ["base", "this"]
    for fact in exported[form].facts:
        assert fact in card
    assert (exported[form].folder / "tokenizer.json").is_file()
    assert list(exported[form].folder.parent.glob(".*")) == []


def test_the_check_is_reported_with_its_numbers(exported):
    for form in ("merged", "gguf", "vllm"):
        assert re.search(r"largest difference of logits \S+ .*, (\d+) of \1 greedy tokens", exported[form].facts[-1])


def test_the_vllm_form_has_the_line_that_serves_it(exported, base):
    (line,) = blocks(exported["vllm"].folder, "sh")
    assert line == f"vllm serve {base} --enable-lora --max-lora-rank 8 --lora-modules vllm=.\n"
    config = json.loads((exported["vllm"].folder / "adapter_config.json").read_text())
    assert (config["r"], config["base_model_name_or_path"]) == (3, str(base))


def test_files_of_others_are_never_replaced(run, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    target = targets.resolve(str(run))
    with pytest.raises(nalora.NALoRAError, match="a folder with files"):
        export(target, "peft", tmp_path)
    link = tmp_path.with_name("link")
    link.symlink_to(tmp_path)
    with pytest.raises(nalora.NALoRAError, match="a symbolic link"):
        export(target, "peft", link)
    (tmp_path / "empty").mkdir()
    export(target, "peft", tmp_path / "empty")
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("stop", [KeyboardInterrupt, OSError("No space left on device")])
def test_an_export_that_is_stopped_leaves_nothing(run, tmp_path, monkeypatch, stop):
    def stopped(*arguments):
        assert list(tmp_path.glob(".out.partial-*/model.safetensors"))
        raise stop

    monkeypatch.setattr(exporting, "_finish", stopped)
    with pytest.raises(BaseException, match=r"No space|^$"):
        export(targets.resolve(str(run)), "merged", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_found_before_weights_are_written(run, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(exporting.shutil, "disk_usage", lambda place: usage._replace(free=1_000_000))
    with pytest.raises(nalora.NALoRAError, match=r"0.0 GB free; expected 0.1 GB"):
        export(targets.resolve(str(run)), "merged", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("factor", "found"),
    [(1.1, "answers other than those of the adapted one: largest"), (float("inf"), "logits that are not finite")],
)
def test_merged_weights_that_answer_differently_are_not_exported(run, tmp_path, monkeypatch, factor, found):
    def damaged(*arguments):
        model = merge(*arguments)
        model.model.layers[0].mlp.gate_proj.weight.data *= factor
        return model

    merge = merging.merge
    monkeypatch.setattr(merging, "merge", damaged)
    with pytest.raises(nalora.NALoRAError, match=found):
        export(targets.resolve(str(run)), "merged", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_of_another_dtype(run, tmp_path, dtype):
    made = export(targets.resolve(str(run)), "merged", tmp_path / "out", dtype=dtype)
    read = transformers.AutoModelForCausalLM.from_pretrained(made.folder)
    assert read.dtype == getattr(torch, dtype)
    assert f"stored as {dtype}" in made.facts[0]


def test_a_model_without_an_adapter(base, tmp_path):
    target = targets.resolve(str(base), device="cpu")
    with pytest.raises(nalora.NALoRAError, match="a model without an adapter"):
        export(target, "vllm", tmp_path / "out")
    made = export(target, "gguf", tmp_path / "out", precision="q8_0")
    assert [file.name for file in made.folder.glob("*.gguf")] == ["out-q8_0.gguf"]
    assert "messages" in blocks(made.folder, "python")[0], "the tokenizer has a chat template, and no run was without"


def adapter_of(base: Path, folder: Path, **options) -> targets.Target:
    """The target of a new LoRA adapter with these options, all of its parameters away from zero."""
    torch.manual_seed(0)
    model = peft.get_peft_model(
        transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
        peft.LoraConfig(**{"r": 2, "target_modules": ["q_proj"]} | options),
    )
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return targets.resolve(str(folder), model=str(base), device="cpu")


@pytest.mark.filterwarnings("ignore")
def test_an_output_layer_trained_beside_a_tied_embedding_is_written(tmp_path):
    model_for("llama", 448, intermediate_size=128, tie_word_embeddings=True).save_pretrained(tmp_path / "tied")
    byte_level("llama-bpe", bos=True).save_pretrained(tmp_path / "tied")
    target = adapter_of(tmp_path / "tied", tmp_path / "adapter", modules_to_save=["lm_head"])
    trained = targets.load(target).trained.model.base_model.model.lm_head.modules_to_save["default"].weight
    for form in ("merged", "gguf"):
        folder = export(target, form, tmp_path / form, precision="f32").folder
        file = {"gguf_file": "gguf-f32.gguf"} if form == "gguf" else {}
        read = transformers.AutoModelForCausalLM.from_pretrained(folder, **file)
        assert torch.equal(read.lm_head.weight, trained)
        assert not torch.equal(read.model.embed_tokens.weight, trained)
        assert not read.config.tie_word_embeddings


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("options", "named"), [({"lora_bias": True}, "lora_bias"), ({"layer_replication": [[0, 2], [1, 2]]}, "replication")]
)
def test_an_adapter_that_cannot_be_merged_is_refused_by_name(base, tmp_path, options, named):
    target = adapter_of(base, tmp_path / "adapter", **options)
    for form in ("merged", "gguf"):
        with pytest.raises(nalora.NALoRAError, match=rf"cannot merge .*{named}.*export --to peft"):
            export(target, form, tmp_path / form)
    with pytest.raises(nalora.NALoRAError, match=rf"{named}|biases"):
        export(target, "vllm", tmp_path / "vllm")
    export(target, "peft", tmp_path / "peft")
    assert {path.name for path in tmp_path.iterdir()} == {"adapter", "peft"}


def test_a_model_whose_configuration_cannot_be_read_is_one_sentence(base, tmp_path):
    shutil.copytree(base, tmp_path / "model")
    config = json.loads((base / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"hidden_size": "x"}))
    for form in ("merged", "gguf"):
        with pytest.raises(nalora.NALoRAError, match="'hidden_size' expected int"):
            export(targets.resolve(str(tmp_path / "model"), device="cpu"), form, tmp_path / form)


def test_a_base_in_4_bits_is_dequantised_and_8_bits_are_refused(base, tmp_path):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    spec = loading.ModelSpec(str(base), quantise="4bit", device="cpu", dtype="float32")
    quantised = loading.load(spec).model
    model = peft.get_peft_model(
        quantised, peft.LoraConfig(target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    )
    model.save_pretrained(tmp_path / "adapter")
    target = targets.Target("adapter", "adapter", spec, tmp_path / "adapter")
    made = export(target, "merged", tmp_path / "out")
    assert "quantised to 4 bits" in made.facts[0]
    read = transformers.AutoModelForCausalLM.from_pretrained(made.folder)
    assert not hasattr(read.config, "quantization_config")
    layer = loading.load(spec).model.model.layers[0].mlp.down_proj
    weight = bitsandbytes.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    assert torch.equal(read.model.layers[0].mlp.down_proj.weight, weight), "the weights that were trained on"
    eight = targets.Target("adapter", "adapter", dataclasses.replace(spec, quantise="8bit"), tmp_path / "adapter")
    with pytest.raises(nalora.NALoRAError, match="quantised by 8bit"):
        export(eight, "merged", tmp_path / "other")
