"""What Liger replaces in transformers is there again after training."""

from __future__ import annotations

import pytest
import tiny
from transformers.models.llama import modeling_llama

from nalora.training.accelerations import liger_contained

liger = pytest.importorskip("liger_kernel.transformers")
NAMES = ("apply_rotary_pos_emb", "LlamaRMSNorm", "LlamaMLP")
BEFORE = {name: getattr(modeling_llama, name) for name in NAMES}


def interrupted(model):
    with liger_contained(model):
        liger._apply_liger_kernel_to_instance(model)
        liger.apply_liger_kernel_to_llama()
        assert not any(getattr(modeling_llama, name) is value for name, value in BEFORE.items())
        raise KeyboardInterrupt


def test_the_names_are_given_back_even_after_an_error():
    forward = modeling_llama.LlamaForCausalLM.forward
    with pytest.raises(KeyboardInterrupt):
        interrupted(tiny.llama().unload())
    assert {name: getattr(modeling_llama, name) for name in NAMES} == BEFORE
    assert modeling_llama.LlamaForCausalLM.forward is forward
