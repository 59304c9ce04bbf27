"""What an optimizer leaves of NA-LoRA's factors, in the gradient's space and in the update's."""

from __future__ import annotations

import json

import pytest
import tiny
import torch
from safetensors.torch import load_file

import nalora
from nalora.runs.folder import RunFolder
from nalora.runs.settings import check
from nalora.training.run import train

GATE_B = "model.layers.0.mlp.gate_proj.lora_B.weight"


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    return {
        "model": tiny.saved_llama(tmp_path_factory.mktemp("base")), "task": "gym/chain_sum", "train_size": 16,
        "settings": {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 3}, "rank": 4, "steps": 1,
        "batch_size": 8, "learning_rate": 1e-2, "max_norm": 0.0, "log_every": 1, "device": "cpu", "max_length": 128,
        "schedule": "constant", "warmup": 0.0,
    }  # fmt: skip


def gate_after_one_step(settings, folder, **changes):
    """B of the first gate: it starts at zero, so this is the step itself."""
    train(check({**settings, **changes, "output": str(folder)}))
    weights = load_file(RunFolder(folder).adapter / "adapter_model.safetensors")
    return next(each for name, each in weights.items() if name.endswith(GATE_B)).double()


def losses(folder):
    return [json.loads(line)["loss"] for line in RunFolder(folder).metrics.read_text().splitlines()]


# ‖step of the masked gradient − plain step‖ / ‖masked step − plain step‖: AdamW divides each number by its own size,
# Adafactor each row by its own; Muon makes the whole matrix orthogonal, which keeps something of how its rows compare.
LEFT = {"adamw_torch": (0, 0.01), "adafactor": (0, 0.05), "muon": (0.1, 0.9), "sgd": (1 - 1e-6, 1 + 1e-6)}


@pytest.mark.parametrize("optimizer", LEFT)
def test_what_is_left_of_a_mask_on_the_gradient_and_all_of_one_on_the_update(settings, tmp_path, optimizer):
    settings = {**settings, "optimizer": optimizer}
    masked = {"method": "na-lora", "scaling": False, "start": "first"}
    plain = gate_after_one_step(settings, tmp_path / "plain")
    update = gate_after_one_step(settings, tmp_path / "update", apply_to="update", **masked)
    gradient = gate_after_one_step(settings, tmp_path / "gradient", apply_to="gradient", **masked)
    mask = (update * plain).sum(1, keepdim=True) / plain.square().sum(1, keepdim=True)
    assert mask.min() < 0.35 < 0.55 < mask.max(), "or there would be nothing to see"
    torch.testing.assert_close(update, mask * plain, rtol=1e-5, atol=1e-9)
    low, high = LEFT[optimizer]
    assert low <= (gradient - plain).norm() / (update - plain).norm() <= high


@pytest.mark.parametrize(
    "method", [{"method": "lora"}, {"method": "lora+"}, {"method": "na-lora", "apply_to": "update"}]
)
def test_muon_trains(settings, tmp_path, method):
    train(check({**settings, **method, "optimizer": "muon", "steps": 20, "output": str(tmp_path)}))
    seen = losses(tmp_path)
    assert seen[-1] < seen[0] - 0.15


def test_muon_is_for_matrices(settings, tmp_path):
    with pytest.raises(nalora.NALoRAError, match="parameters that are no matrices, such as .*magnitude"):
        train(check({**settings, "method": "dora", "optimizer": "muon", "output": str(tmp_path)}))
