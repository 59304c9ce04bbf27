"""Every tuner of the installed PEFT as a run: trained, resumed, loaded by stock PEFT, evaluated, diagnosed.

The list is PEFT's own, so that a tuner that a later PEFT adds is tried, and refused by name if it fails.
"""

from __future__ import annotations

import peft
import pytest
import tiny
import torch
import transformers
from methods.small import TUNER_SETTINGS
from safetensors.torch import load_file

from nalora.diagnostics import dynamics
from nalora.diagnostics.inputs import DiagnosisOptions
from nalora.evaluation.targets import Request, evaluate_target
from nalora.methods.peft_tuners import tuners
from nalora.runs.folder import RunFolder
from nalora.runs.settings import check
from nalora.training.run import train

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny.saved_llama(tmp_path_factory.mktemp("base"))


@pytest.mark.parametrize("tuner", sorted(tuners()))
def test_a_whole_run(base, tmp_path, monkeypatch, tuner):
    monkeypatch.setenv("NALORA_CACHE", str(tmp_path / "cache"))
    settings = {
        "model": base, "task": "gym/chain_sum", "train_size": 24, "test_size": 4, "rank": 4, "steps": 4,
        "settings": {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2},
        "batch_size": 4, "learning_rate": 1e-2, "device": "cpu", "save_every": 2, "snapshot_every": 2,
        "method": f"peft/{tuner}", **TUNER_SETTINGS.get(tuner, {}),
    }  # fmt: skip
    whole, halves = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "halves")
    for folder in (whole, halves):
        result = train(check({**settings, "output": str(folder.path)}))
    assert result["trainable_parameters"] > 0

    halves.result.unlink()  # as a kill in the middle of the last checkpoint leaves it
    (halves.checkpoints / "checkpoint-4" / "complete").unlink()
    train(check({**settings, "output": str(halves.path)}), resume=True)
    one, other = (load_file(folder.adapter / "adapter_model.safetensors") for folder in (whole, halves))
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())

    stock = transformers.AutoModelForCausalLM.from_pretrained(base).eval()
    ids = torch.arange(4, 24)[None]
    before = stock(ids).logits.detach()
    loaded = peft.PeftModel.from_pretrained(stock, whole.adapter).eval()
    assert (loaded(ids).logits - before).abs().max() > 1e-6

    summaries = evaluate_target(str(whole.path), Request(None, None, {}, None, None, 32_768))
    losses = [summary["target_loss"]["value"] for summary in summaries.values()]
    assert len(losses) == 2
    assert losses[0] != losses[1], "the evaluated adapter is the trained one"

    diagnosis = dynamics.diagnose(whole.path, DiagnosisOptions(probe_size=4))
    assert [interval["to"] for interval in diagnosis["intervals"]] == [2, 4]
