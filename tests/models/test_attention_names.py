"""An attention implementation that cannot run is named before the model is looked for, with a fix that works."""

from __future__ import annotations

import importlib.util

import pytest
import tiny

import nalora
from nalora.models.attention_names import refuse_unusable_attention
from nalora.models.loading import ModelSpec, load


def test_flash_attention_on_a_cpu_is_one_sentence_before_the_model_is_read(tmp_path):
    """Installing the package would not help there, so that is not the advice."""
    with pytest.raises(nalora.NALoRAError, match="attention: flash_attention_2: found the device cpu") as raised:
        load(ModelSpec("no/such-model", device="cpu", attention="flash_attention_2"))
    assert "\n" not in str(raised.value)
    assert raised.value.fix == "set attention to sdpa, or leave it out"
    folder = tiny.saved_llama(tmp_path)
    for attention in ("sdpa", None):
        assert load(ModelSpec(folder, device="cpu", attention=attention)).model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("name", "package"), [("flash_attention_2", "flash_attn"), ("flash_attention_3", "flash_attn_interface")]
)
def test_a_missing_package_is_named(name, package):
    if importlib.util.find_spec(package) or importlib.util.find_spec("kernels"):
        pytest.skip("it is installed")
    with pytest.raises(nalora.NALoRAError, match=f"no package {package}.*set attention to sdpa"):
        refuse_unusable_attention(name, "cuda:0")


def test_a_misspelt_name_is_answered_with_the_one_that_is_meant():
    with pytest.raises(nalora.NALoRAError, match=r"did you mean flash_attention_2\?"):
        load(ModelSpec("no/such-model", device="cpu", attention="flash_attn_2"))


@pytest.mark.parametrize(
    "name", [None, "sdpa", "eager", "flex_attention", "kernels-community/flash-attn2", "paged|eager"]
)
def test_what_transformers_decides_is_left_to_it(name):
    refuse_unusable_attention(name, "cpu")
