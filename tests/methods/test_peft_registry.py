"""PEFT's tuners read from its files: the same list that PEFT gives, without importing it."""

from __future__ import annotations

import subprocess
import sys

import pytest
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

import nalora
from nalora import methods
from nalora.methods.peft_registry import DESCRIPTIONS, UNSUPPORTED, described, registered
from nalora.methods.peft_tuners import tuners


def test_the_list_is_pefts_own():
    known = {str(kind.value).lower(): config.__name__ for kind, config in PEFT_TYPE_TO_CONFIG_MAPPING.items()}
    assert registered() == known


def test_every_tuner_that_can_be_trained_has_a_line_of_its_own():
    assert described().keys() == tuners().keys() == DESCRIPTIONS.keys() & registered().keys()
    assert described()["vera"] == ("VeRA: trained scales of random matrices that all layers share", "peft.VeraConfig")


@pytest.mark.parametrize("tuner", sorted(registered().keys() - tuners().keys()))
def test_the_others_are_refused_by_name_with_the_reason(tuner):
    with pytest.raises(nalora.NALoRAError) as refusal:
        methods.get(f"peft/{tuner}")
    assert UNSUPPORTED[tuner] in str(refusal.value)
    assert "a tuner of PEFT that no run can train" in str(refusal.value)


def test_listing_the_methods_imports_neither_peft_nor_transformers():
    """Each takes seconds; with torch alone the list is there in about two."""
    script = (
        "import sys; from nalora.cli import listing; listing.methods();"
        " print([name for name in ('peft', 'transformers', 'bitsandbytes') if name in sys.modules])"
    )
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert printed.splitlines()[-1] == "[]"
    assert "peft/vera" in printed
