"""Names of modules in a base model and in PEFT's wrapper around it."""

from __future__ import annotations

import tiny

from nalora.models.peft_names import ADAPTER, in_base, in_wrapper


def test_names_lead_to_the_same_modules():
    wrapped = tiny.llama()
    base = wrapped.get_base_model()
    assert list(wrapped.peft_config) == [ADAPTER]
    for name, module in base.named_modules():
        assert wrapped.get_submodule(in_wrapper(name).rstrip(".")) is module
        assert in_base(in_wrapper(name)) == name
        assert in_base(name) == name
