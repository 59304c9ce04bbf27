"""The complete example of docs/extending.md is a method: it trains, resumes, and its adapter loads in stock PEFT."""

from __future__ import annotations

import re
from pathlib import Path

import peft
import pytest
import tiny
import torch
import transformers
from safetensors.torch import load_file

import nalora
from nalora.runs.settings import check
from nalora.training.run import train

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"


@pytest.fixture
def settings(tmp_path):
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "lora_fa.py").write_text(example, encoding="utf-8")
    return {
        "model": tiny.saved_llama(tmp_path / "base"), "task": "gym/chain_sum", "train_size": 24, "test_size": 4,
        "settings": {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}, "rank": 4,
        "steps": 4, "batch_size": 4, "learning_rate": 1e-2, "device": "cpu", "output": str(tmp_path / "run"),
        "method": str(tmp_path / "lora_fa.py"), "orthogonal": True,
    }  # fmt: skip


def test_the_example_trains_b_alone(settings, tmp_path):
    result = train(check(settings))
    assert result["method"] == "lora-fa"
    adapter = load_file(tmp_path / "run" / "adapter" / "adapter_model.safetensors")
    for name, tensor in adapter.items():
        if "lora_A" in name:
            torch.testing.assert_close(tensor @ tensor.T, torch.eye(4), rtol=0, atol=1e-5)
        else:
            assert tensor.abs().sum() > 0
    base = transformers.AutoModelForCausalLM.from_pretrained(settings["model"])
    peft.PeftModel.from_pretrained(base, tmp_path / "run" / "adapter")


def test_na_lora_controls_the_example(settings, tmp_path):
    """In the first step, after which everything differs: only what it controls."""
    settings = {**settings, "steps": 1, "warmup": 0.0, "schedule": "constant"}
    on_it = {"method": "na-lora", "on": settings["method"], "apply_to": "update", "start": "first"}
    train(check({**settings, **on_it, "output": str(tmp_path / "controlled")}))
    train(check(settings))
    plain, controlled = (
        load_file(tmp_path / n / "adapter" / "adapter_model.safetensors") for n in ("run", "controlled")
    )
    changed = {name for name in plain if not torch.equal(plain[name], controlled[name])}
    assert changed
    assert all("lora_B" in name and ".mlp." in name for name in changed)


def test_its_settings_are_checked_with_all_others(settings):
    with pytest.raises(nalora.NALoRAError, match=r"orthogonl.*did you mean orthogonal"):
        check({**{k: v for k, v in settings.items() if k != "orthogonal"}, "orthogonl": True})


@pytest.mark.parametrize(("text", "message"), [(None, "no such file"), ("x = 1", "no METHODS in the file")])
def test_a_file_that_is_no_method(tmp_path, text, message):
    file = tmp_path / "method.py"
    if text:
        file.write_text(text)
    with pytest.raises(nalora.NALoRAError, match=message):
        check({"model": "m", "task": "gym/chain_sum", "method": str(file)})
