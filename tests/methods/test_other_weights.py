"""A start from gradients is refused where not every process has the model's weights."""

from __future__ import annotations

import pytest
import torch
from gradient_models import keep_all, llama, rows, start_on, wrapped

import nalora
from nalora.distributed import processes
from nalora.methods import gradients


def test_a_process_without_the_weights_is_named(monkeypatch):
    """As FSDP's cpu_ram_efficient_loading leaves every process but the first: with zeros, here on the second of two."""
    monkeypatch.setattr(processes, "count", lambda: 2)
    monkeypatch.setattr(processes, "any_process", lambda holds, *_: holds)
    monkeypatch.setattr(gradients, "sum_over_processes", lambda tensor: tensor + torch.zeros_like(tensor))
    with pytest.raises(nalora.NALoRAError, match="fsdp_cpu_ram_efficient_loading: false"):
        gradients.reduce_mean_gradients(wrapped(llama()), start_on(rows()), 1, keep_all, {})
