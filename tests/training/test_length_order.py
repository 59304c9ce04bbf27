"""Batches of similar length: every example once, little padding, a reproducible order."""

from __future__ import annotations

import json

import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st

import nalora
from nalora.runs.folder import RunFolder
from nalora.runs.settings import check
from nalora.training.batches import LikeLengths
from nalora.training.run import train


@given(
    lengths=st.lists(st.integers(1, 99), min_size=1, max_size=400),
    batch_size=st.integers(1, 9),
    seed=st.integers(0, 2**20),
)
def test_every_example_once_and_the_same_again(lengths, batch_size, seed):
    order = list(LikeLengths(lengths, batch_size, seed))
    assert sorted(order) == list(range(len(lengths)))
    assert order == list(LikeLengths(lengths, batch_size, seed))


def test_another_pass_and_another_seed_are_other_orders():
    sampler = LikeLengths([1] * 64, 4, seed=0)
    first = list(sampler)
    sampler.set_epoch(1)
    assert list(sampler) != first
    assert list(LikeLengths([1] * 64, 4, seed=1)) not in (first, list(sampler))


def test_few_pads():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(20, 400, (3_200,), generator=generator).tolist()

    def padded(order):
        batches = [order[i : i + 32] for i in range(0, len(order), 32)]
        return sum(32 * max(lengths[i] for i in batch) for batch in batches) / sum(lengths)

    assert padded(list(range(3_200))) > 1.7
    assert padded(list(LikeLengths(lengths, 32, 0))) < 1.05


@pytest.fixture
def settings(tmp_path):
    return {
        "model": tiny.saved_llama(tmp_path / "base"), "task": "gym/chain_sum", "train_size": 40, "test_size": 4,
        "settings": {"min_terms": 2, "max_terms": 6, "min_digits": 1, "max_digits": 4}, "rank": 4, "epochs": 2,
        "batch_size": 4, "learning_rate": 1e-3, "device": "cpu", "log_every": 1, "batches": "like-length",
    }  # fmt: skip


def test_a_resumed_run_finds_its_order_again(settings, tmp_path):
    settings["save_every"] = 7
    losses = {}
    for name in ("whole", "halves"):
        run = check({**settings, "output": str(tmp_path / name)})
        train(run)
        folder = RunFolder(tmp_path / name)
        if name == "halves":
            folder.result.unlink()
            for step in (14, 20):
                for mark in folder.checkpoints.glob(f"checkpoint-{step}/complete"):
                    mark.unlink()
            train(run, resume=True)
        losses[name] = [json.loads(line)["loss"] for line in folder.metrics.read_text().splitlines()]
    assert len(losses["whole"]) == 20
    assert losses["whole"] == losses["halves"]


def test_liger_on_a_cpu_is_refused(settings, tmp_path):
    with pytest.raises(nalora.NALoRAError, match="liger"):
        train(check({**settings, "liger": True, "output": str(tmp_path / "run")}))
