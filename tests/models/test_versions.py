"""Versions of other packages: compared as numbers, and what only newer ones can do is refused by version."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from peft import LoraConfig
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from small_models import causal_model

from nalora import NALoRAError, methods
from nalora.methods import peft_tuners
from nalora.models import versions
from nalora.models.gguf_cache import dense_folder
from nalora.models.target_modules import resolve_targets


@pytest.fixture
def oldest(monkeypatch):
    """The version numbers of the oldest packages, whatever is installed."""
    numbers = {"peft": "0.18.0", "transformers": "5.5.4", "accelerate": "1.10.1"}
    monkeypatch.setattr(versions, "version", numbers.__getitem__)


@pytest.mark.parametrize(
    ("installed", "needed", "older"),
    [
        ("0.18.1", "0.19", True),
        ("0.19.0", "0.19", False),
        ("5.9.0", "5.10", True),
        ("5.10.0.dev0", "5.10", False),
        ("6.0.0", "5.10", False),
        ("1.13.0rc1", "1.13", False),
    ],
)
def test_versions_are_compared_by_their_numbers(monkeypatch, installed, needed, older):
    monkeypatch.setattr(versions, "version", lambda _: installed)
    assert versions.is_older("peft", needed) == older


def test_a_newer_version_is_asked_for_by_name(oldest):
    versions.require("peft", "0.18", where="here", what="matter")
    with pytest.raises(NALoRAError, match=r"here: found peft 0\.18\.0, which does not fly.*pip install 'peft>=0\.20'"):
        versions.require("peft", "0.20", where="here", what="fly")


def test_every_tuner_of_the_installed_peft_is_of_the_oldest_or_listed_with_its_version():
    installed = {kind.value.lower() for kind in PEFT_TYPE_TO_CONFIG_MAPPING}
    for tuner, first in versions.TUNERS.items():
        assert (tuner in installed) != versions.is_older("peft", first), tuner


def test_a_tuner_of_a_newer_peft_is_refused_by_its_version(oldest, monkeypatch):
    monkeypatch.setattr(peft_tuners, "tuners", dict)
    peft_tuners.method_of.cache_clear()
    with pytest.raises(NALoRAError, match=r"peft/hira.*peft 0\.18\.0, which does not have this tuner.*peft>=0\.20"):
        methods.get("peft/hira")
    peft_tuners.method_of.cache_clear()


def test_a_gguf_file_is_refused_where_its_tokenizer_would_change(oldest, tmp_path):
    with pytest.raises(NALoRAError, match=r"a\.gguf: found transformers 5\.5\.4.*transformers>=5\.17"):
        dense_folder(tmp_path / "a.gguf")


def test_an_fsdp2_checkpoint_is_refused_where_other_adapters_would_be_loaded(oldest):
    with pytest.raises(NALoRAError, match=r"checkpoint-3.*accelerate 1\.10\.1.*accelerate>=1\.13"):
        versions.require_fsdp2_resume("checkpoint-3")


@pytest.mark.parametrize(
    "targets", ["all-linear", ["q_proj", "gate_proj", "up_proj"], r".*\.mlp\.experts\.(gate|up)_proj"], ids=str
)
def test_experts_by_the_names_of_their_layers_need_a_newer_peft(oldest, targets):
    model = causal_model("qwen3_moe")
    with pytest.raises(NALoRAError, match=r"peft 0\.18\.0, which does not adapt experts") as raised:
        resolve_targets(LoraConfig(target_modules=targets), model)
    names = raised.value.fix.partition("name layers outside the experts: ")[2].split(", ")
    assert "q_proj" in names
    assert not {"gate_proj", "up_proj"} & set(names)
    resolve_targets(LoraConfig(target_modules=names), model)


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe"])
def test_layers_outside_the_experts_do_not(oldest, model_type):
    targets = "all-linear" if model_type == "llama" else ["q_proj", "o_proj"]
    resolve_targets(LoraConfig(target_modules=targets), causal_model(model_type))


def test_first_labels_are_counted_by_an_older_trainer_for_losses_that_shift(oldest):
    def counts(loss_type, encoder_decoder=False):
        config = SimpleNamespace(is_encoder_decoder=encoder_decoder)
        return versions.counts_first_labels(SimpleNamespace(loss_type=loss_type, config=config))

    assert counts("ForCausalLM")
    assert not counts("ForConditionalGeneration", encoder_decoder=True)
    assert not counts("ForSequenceClassification")
    assert not counts(None)
