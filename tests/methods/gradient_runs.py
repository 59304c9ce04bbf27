"""Short runs of methods that start from gradients."""

from __future__ import annotations

import shutil

import tiny
import torch
from safetensors.torch import load_file

from nalora.runs.folder import RunFolder
from nalora.runs.settings import check
from nalora.training.run import train


def settings_of(tmp_path, **more) -> dict:
    return {
        "model": tiny.saved_llama(tmp_path / "base"), "task": "gym/chain_sum", "train_size": 48, "test_size": 8,
        "settings": {"min_terms": 2, "max_terms": 2}, "steps": 4, "batch_size": 8, "learning_rate": 1e-3,
        "log_every": 1, "device": "cpu", "max_length": 128, "rank": 4, "gradient_batches": 2,
        "save_every": 2, "output": str(tmp_path / "run"),
    } | more  # fmt: skip


def check_that_it_resumes_without_gradients(settings, module, tmp_path, monkeypatch) -> None:
    """Resumed half-way, with the cache of gradients gone, a run ends in the very same adapter.

    Args:
        settings: of the run.
        module: the method's, which must not take gradients again.
        tmp_path: for the cache.
        monkeypatch: pytest's.
    """
    monkeypatch.setenv("NALORA_CACHE", str(tmp_path / "cache"))
    train(check(settings))
    folder = RunFolder(settings["output"])
    whole = load_file(folder.adapter / "adapter_model.safetensors")
    folder.result.unlink()
    shutil.rmtree(folder.adapter)
    shutil.rmtree(folder.checkpoints / "checkpoint-4")
    shutil.rmtree(tmp_path / "cache")

    def never(*_):
        raise AssertionError("a resumed run takes no gradients")

    monkeypatch.setattr(module, "reduce_mean_gradients", never)
    train(check(settings), resume=True)
    again = load_file(folder.adapter / "adapter_model.safetensors")
    assert whole.keys() == again.keys()
    assert all(torch.equal(whole[name], again[name]) for name in whole)
