"""Adapters in folders: the same outputs as PEFT's own loading, the base kept as it was, and every damage named."""

from __future__ import annotations

import json

import peft
import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

import nalora
from nalora.models.adapters import CONFIG_FILE, adapter_config, is_adapter, with_adapter

WEIGHTS = "adapter_model.safetensors"


def base():
    return tiny.llama(torch.float32, lora_b=0).unload().eval()


def outputs(model):
    with torch.no_grad():
        return model(tiny.tokens()).logits


@pytest.fixture
def folder(tmp_path):
    tiny.llama(torch.float32).save_pretrained(tmp_path)
    return tmp_path


def test_a_base_with_an_adapter_is_what_was_trained_and_the_kept_base_shares_its_weights(folder):
    plain = base()
    before = outputs(plain)
    adapted = with_adapter(plain, folder, keep_base=True)
    assert torch.equal(outputs(adapted), outputs(tiny.llama(torch.float32).eval()))
    assert not torch.equal(outputs(adapted), before)
    assert torch.equal(outputs(plain), before)
    weight = plain.get_parameter("model.layers.0.mlp.up_proj.weight")
    assert adapted.get_parameter("base_model.model.model.layers.0.mlp.up_proj.base_layer.weight") is weight
    in_place = with_adapter(plain, folder)
    assert torch.equal(outputs(plain), outputs(in_place))
    assert not in_place.training


def test_an_adapter_that_changes_the_base_s_weights_gets_its_own(tmp_path):
    peft.get_peft_model(base(), peft.LoraConfig(r=2, init_lora_weights="pissa")).save_pretrained(tmp_path)
    plain = base()
    before = outputs(plain)
    adapted = with_adapter(plain, tmp_path, keep_base=True)
    torch.testing.assert_close(outputs(adapted), before)
    assert torch.equal(outputs(plain), before)


def wider(tensors):
    return {name: torch.cat([tensor, tensor], -1) for name, tensor in tensors.items()}


def without_one(tensors):
    return dict(list(tensors.items())[1:])


def with_another(tensors):
    first = next(iter(tensors))
    return tensors | {first.replace("layers.0", "layers.7"): tensors[first].clone()}


@pytest.mark.parametrize("change", [wider, without_one, with_another])
def test_an_adapter_of_another_model_is_refused(folder, change):
    save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS)
    with pytest.raises(nalora.NALoRAError, match=r"an adapter of another model .*give the base model"):
        with_adapter(base(), folder)


def test_a_damaged_adapter_is_named(folder):
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole[:-100])
    with pytest.raises(nalora.NALoRAError, match=rf"{folder}.* an adapter that PEFT cannot load"):
        with_adapter(base(), folder)
    (folder / WEIGHTS).unlink()
    with pytest.raises(nalora.NALoRAError, match="cannot load"):
        with_adapter(base(), folder)


@pytest.mark.parametrize(("text", "found"), [("{", "no JSON"), ("[]", "no peft_type"), ("{}", "no peft_type")])
def test_a_config_that_is_no_adapter_s_is_refused(tmp_path, text, found):
    (tmp_path / CONFIG_FILE).write_text(text)
    assert is_adapter(tmp_path)
    with pytest.raises(nalora.NALoRAError, match=found):
        adapter_config(tmp_path)


def test_no_module_that_a_config_names_is_imported(folder, tmp_path, monkeypatch):
    """PEFT imports the module `megatron_core`, by whatever name the file gives, to look for its layers."""
    (tmp_path / "evil.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = json.loads((folder / CONFIG_FILE).read_text())
    (folder / CONFIG_FILE).write_text(json.dumps(config | {"megatron_config": {"a": 1}, "megatron_core": "evil"}))
    with pytest.raises(nalora.NALoRAError, match="import the Python module 'evil'"):
        with_adapter(base(), folder)
