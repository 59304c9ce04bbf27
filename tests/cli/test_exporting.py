"""`nalora export` as a user types it."""

from __future__ import annotations

import re

import peft
import pytest
import yaml
from exported_models import byte_level, model_for
from typer.testing import CliRunner

import nalora
from nalora import cli


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """An adapter of somebody's own script, with its base model next to it."""
    folder = tmp_path_factory.mktemp("own")
    model_for("qwen2", 448).save_pretrained(folder / "base")
    byte_level("qwen2", nfc=True).save_pretrained(folder / "base")
    config = peft.LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model = peft.get_peft_model(nalora_base(folder), config)
    model.save_pretrained(folder / "adapter")
    return folder / "adapter"


def nalora_base(folder):
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder / "base")


def export(*arguments):
    return CliRunner().invoke(cli.app, ["export", *map(str, arguments)])


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
    monkeypatch.setattr(cli.exporting, "hush_libraries", lambda: None)


def test_an_adapter_of_ones_own_script_becomes_a_gguf_file(adapter, tmp_path):
    done = export(adapter, "--to", "gguf", "--precision", "q8_0", "--output", tmp_path / "mine", "--device", "cpu")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "mine" / "mine-q8_0.gguf").is_file()
    assert "Matrices are stored as q8_0." in done.output
    assert "In llama.cpp texts are not normalised to NFC" in done.output
    assert "greedy tokens equal" in done.output
    card = (tmp_path / "mine" / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"\| `(\w+)` \|", card) == ["rank", "alpha", "target_modules"], "all that an adapter knows"
    assert "llama-server -m mine-q8_0.gguf" in card


def test_mistakes_are_refused_before_anything_is_loaded(adapter, tmp_path, monkeypatch):
    monkeypatch.setattr("nalora.models.loading.load", lambda *arguments, **options: pytest.fail("loaded"))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    done = export(adapter, "--to", "merged", "--output", tmp_path / "full")
    assert "a folder with files" in str(done.exception)
    done = export(adapter, "--to", "ollama", "--output", tmp_path / "new")
    assert done.exit_code == 2
    done = export(tmp_path / "none", "--to", "peft", "--output", tmp_path / "new")
    assert isinstance(done.exception, nalora.NALoRAError)
    assert not (tmp_path / "new").exists()


def test_code_of_somebodys_run_needs_trust(adapter, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    settings = {"model": str(adapter.parent / "base"), "task": "evil.py", "trust_remote_code": True}
    (run / "run.yaml").write_text(yaml.safe_dump(settings))
    (tmp_path / "evil.py").write_text("raise SystemExit('ran')")
    done = export(run, "--to", "peft", "--output", tmp_path / "out")
    assert "--trust" in str(done.exception)
    assert not (tmp_path / "out").exists()
