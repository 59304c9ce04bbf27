"""The plugin for Axolotl: the real package, on a small model."""

from __future__ import annotations

import subprocess

import pytest
from other_trainers import Trained, same, weights

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def axolotl(tmp_path_factory) -> Trained:
    return Trained("axolotl", tmp_path_factory.mktemp("axolotl"))


def test_the_adapter_is_that_of_attach_trainer_bit_for_bit(axolotl):
    axolotl.check_adapter()


def test_the_state_is_in_the_checkpoints_and_resumed(axolotl):
    axolotl.check_resumption()


def test_axolotl_s_lora_kernels_are_switched_off_with_a_notice(axolotl):
    printed = axolotl.printed["ours"]
    assert "lora_mlp_kernel, lora_qkv_kernel, lora_o_kernel are set to false" in printed
    assert "Auto-enabling LoRA kernel" not in printed


def test_without_the_plugin_s_name_it_does_nothing(axolotl):
    """Axolotl loads it all the same."""
    printed = axolotl.printed["plain"]
    assert "Plugin loaded successfully: nalora.integrations.axolotl.NALoRAPlugin" in printed
    assert "NA-LoRA" not in printed


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"aply_to": "update"}, "did you mean apply_to?"),
        ({"apply_to": "updates"}, "'gradient' or 'update'"),
        ({"keep_ratio": 2}, "a number in (0, 1]"),
        ({"gate": {"slope": 1}}, "values of sensitivity, low, high"),
    ],
)
def test_axolotl_s_schema_refuses_wrong_settings(axolotl, tmp_path, settings, message):
    printed = axolotl.run(tmp_path / "wrong", "ours", nalora=settings)
    assert axolotl.code != 0
    assert message in printed
    assert not (tmp_path / "wrong" / "out").exists()


def test_axolotl_resolves_the_class_and_the_entry_point(axolotl, tmp_path):
    """Every form of the name is one plugin, which a block of settings alone selects too."""
    name = "nalora.integrations.axolotl.NALoRAPlugin"
    for number, plugins in enumerate(([name], [name.replace(".NALoRA", ":NALoRA")], None)):
        printed = axolotl.run(tmp_path / str(number), "ours", plugins=plugins)
        assert printed.count("nalora: NA-LoRA is attached to ") == 1
        assert same(weights(tmp_path / str(number)), weights(axolotl.folder / "ours"))


def test_importing_nalora_does_not_import_axolotl(axolotl):
    code = "import sys, nalora; nalora.attach_trainer, nalora.attach; sys.exit('axolotl' in sys.modules)"
    assert subprocess.run([axolotl.python, "-c", code]).returncode == 0
