"""LLaMA-Factory, ms-swift and TRL's command line under `nalora launch`: the real packages, on a small model."""

from __future__ import annotations

import pytest
from other_trainers import Trained

pytestmark = pytest.mark.slow

FULL = {
    "llamafactory": {"finetuning_type": "full"},
    "swift": {"tuner_type": "full"},
    "trl": {"use_peft": "false"},
}


@pytest.fixture(scope="module", params=FULL)
def project(request, tmp_path_factory) -> Trained:
    return Trained(request.param, tmp_path_factory.mktemp(request.param))


def test_the_adapter_is_that_of_attach_trainer_bit_for_bit(project):
    project.check_adapter()


def test_the_state_is_in_the_checkpoints_and_resumed(project):
    project.check_resumption()


def test_full_fine_tuning_is_reported_as_not_attached(project, tmp_path):
    printed = project.run(tmp_path, "ours", **FULL[project.name])
    assert project.code == 3
    assert "nalora: nothing was attached: " in printed
    assert "without LoRA layers" in printed
