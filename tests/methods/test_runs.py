"""Whole runs with each method: killed and resumed they end with the same bits, and stock PEFT loads what they save."""

from __future__ import annotations

import peft
import pytest
import tiny
import torch
import transformers
from safetensors.torch import load_file

from nalora.training.folder import RunFolder
from nalora.training.run import train
from nalora.training.settings import check


@pytest.mark.parametrize(
    "options",
    [
        {"method": "rslora"},
        {"method": "dora"},
        {"method": "lora+", "ratio": 4},
        {"method": "pissa"},
        {"method": "adalora"},
        {"method": "na-lora", "on": "rslora"},
        {"method": "na-lora", "on": "dora"},
        {"method": "na-lora", "on": "lora+"},
        {"method": "na-lora", "on": "pissa", "iterations": 4},
    ],
    ids=lambda options: "-on-".join(str(v) for k, v in options.items() if k in ("method", "on")),
)
def test_a_run_killed_and_resumed_is_the_whole_run(tmp_path, options):
    settings = {
        "model": tiny.saved_llama(tmp_path / "base"), "task": "gym/chain_sum", "train_size": 24, "test_size": 4,
        "settings": {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}, "rank": 4,
        "steps": 6, "batch_size": 4, "learning_rate": 1e-3, "device": "cpu", "save_every": 3, **options,
    }  # fmt: skip
    whole, halves = ({**settings, "output": str(tmp_path / name)} for name in ("whole", "halves"))
    train(check(whole))
    train(check(halves))
    folder = RunFolder(halves["output"])
    folder.result.unlink()  # as a kill in the middle of the last checkpoint leaves it
    (folder.checkpoints / "checkpoint-6" / "complete").unlink()
    (folder.adapter / "adapter_model.safetensors").unlink()
    train(check(halves), resume=True)
    one, other = (load_file(tmp_path / name / "adapter" / "adapter_model.safetensors") for name in ("whole", "halves"))
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    stock = transformers.AutoModelForCausalLM.from_pretrained(settings["model"]).eval()
    ids = torch.arange(4, 24)[None]
    before = stock(ids).logits
    loaded = peft.PeftModel.from_pretrained(stock, folder.adapter).eval()
    after = loaded(ids).logits
    assert (after - before).abs().max() > 1e-5
    torch.testing.assert_close(loaded.merge_and_unload()(ids).logits, after, rtol=0, atol=1e-5)
