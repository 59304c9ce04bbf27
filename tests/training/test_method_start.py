"""What a method gets before the first step does not depend on how a batch is split."""

from __future__ import annotations

import pytest
import torch
from methods.gradient_runs import settings_of
from safetensors.torch import load_file

from nalora.distributed import processes
from nalora.runs.folder import RunFolder
from nalora.runs.settings import RunSettings, check
from nalora.training.batches import make_start
from nalora.training.run import train


def rows_of(monkeypatch, *, count=1, batches=3, examples=50, **settings):
    """The examples that all processes together get, the size of each pass, and the number of passes announced."""
    monkeypatch.setattr(processes, "count", lambda: count)
    found, sizes, passes = [], [], 0
    for rank in range(count):
        monkeypatch.setattr(processes, "rank", lambda rank=rank: rank)
        start = make_start(
            RunSettings("model", "task", seed=3, **settings), range(examples),
            lambda rows: {"rows": torch.tensor(rows)}, torch.device("cpu"), None, lambda *_: None,
        )  # fmt: skip
        own = [batch["rows"].tolist() for batch in start.batches(batches)]
        found += [row for batch in own for row in batch]
        sizes += map(len, own)
        passes += batches * start.passes
    assert passes == len(sizes)
    return sorted(found), max(sizes)


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("micro", [None, 1, 2])
def test_rows_are_batches_times_batch_size_whatever_the_split(monkeypatch, count, micro):
    whole, size = rows_of(monkeypatch, batch_size=8)
    assert (len(whole), len(set(whole)), size) == (24, 24, 8)
    split, size = rows_of(monkeypatch, batch_size=8, micro_batch_size=micro, count=count)
    assert split == whole
    assert size == (micro or 8 // count)


def test_a_batch_larger_than_the_data_has_every_row_once(monkeypatch):
    assert rows_of(monkeypatch, batch_size=8, examples=5, batches=1) == ([0, 1, 2, 3, 4], 5)


@pytest.mark.parametrize("method", ["lora-ga", "gora"])
def test_the_start_of_a_run_is_the_same_in_any_passes(tmp_path, method, monkeypatch):
    monkeypatch.setenv("NALORA_CACHE", str(tmp_path / "cache"))
    settings = settings_of(tmp_path, method=method, learning_rate=0.1, optimizer="sgd", steps=2, save_every=0, rank=2)
    adapters = []
    for micro in (8, 2):
        output = tmp_path / f"run-{micro}"
        train(check({**settings, "micro_batch_size": micro, "output": str(output)}))
        adapters.append(load_file(RunFolder(output).adapter / "adapter_model.safetensors"))
    whole, split = adapters
    assert whole.keys() == split.keys()
    # Single vectors may change their sign: the product is what counts.
    whole, split = (products(each) for each in adapters)
    for name, tensor in whole.items():
        torch.testing.assert_close(split[name], tensor, rtol=1e-3, atol=2e-3 * tensor.abs().max().item())


def products(adapter):
    return {
        name: adapter[name.replace("lora_A", "lora_B")] @ tensor for name, tensor in adapter.items() if "lora_A" in name
    }
