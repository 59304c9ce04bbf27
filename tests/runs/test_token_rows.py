"""Rows of tokens in flat arrays, or tokenised when they are needed: the same rows, the same training."""

from __future__ import annotations

import json
import tracemalloc

import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st
from launched import losses, weights
from stopped_runs import train_and_stop

from nalora import tasks
from nalora.runs import encoding
from nalora.runs.settings import check
from nalora.runs.token_rows import DerivedRows, StoredRows, packed_rows
from nalora.training.run import train

IDS = st.lists(st.integers(-100, 2**31 - 1), max_size=5)


@given(st.lists(st.fixed_dictionaries({"input_ids": IDS, "labels": IDS}), min_size=1, max_size=6))
def test_stored_rows_are_those_that_were_added(rows):
    stored = StoredRows(rows)
    assert len(stored) == len(rows)
    assert [stored[index] for index in range(len(rows))] == rows == stored[:]
    assert stored[-1] == rows[-1]
    assert stored.lengths == [len(row["input_ids"]) for row in rows]
    assert stored.tokens == sum(len(ids) for row in rows for ids in row.values())
    with pytest.raises(IndexError):
        stored[len(rows)]


@given(st.lists(st.integers(1, 6), min_size=1, max_size=12))
def test_packed_rows_hold_every_row_once_and_in_order(lengths):
    rows = DerivedRows(lengths, lambda index: {"input_ids": [index] * lengths[index]})
    packed = packed_rows(
        rows, lengths, 6, lambda parts: {"input_ids": [i for part in parts for i in part["input_ids"]]}
    )
    assert all(len(row["input_ids"]) <= 6 for row in packed[:])
    assert packed.lengths.tolist() == [len(row["input_ids"]) for row in packed[:]]
    assert [i for row in packed[:] for i in row["input_ids"]] == [i for i, n in enumerate(lengths) for _ in range(n)]


@pytest.fixture(params=["random", "like-length"])
def settings(tmp_path, request):
    with (tmp_path / "sums.jsonl").open("w") as file:
        for n in range(60):
            file.write(json.dumps({"question": f"{n} + {'1' * (n % 7)} =", "answer": n}) + "\n")
    return {
        "model": tiny.saved_llama(tmp_path / "base", layers=1), "task": str(tmp_path / "sums.jsonl"), "max_length": 22,
        "steps": 20, "batch_size": 4, "device": "cpu", "log_every": 1, "validation_size": 5, "dropout": 0.1,
        "batches": request.param, "learning_rate": 1e-2,
    }  # fmt: skip


def test_training_is_the_same_bit_for_bit_however_rows_are_kept_and_after_a_stop(settings, tmp_path, monkeypatch):
    def run(name):
        return check(settings | {"output": str(tmp_path / name)})

    result = train(run("stored"))
    assert result["dropped_too_long"] > 0
    monkeypatch.setattr(encoding, "MOST_STORED", 0)
    train(run("derived"))
    # Stopped in the second epoch: order, dropout and the optimizer's state continue.
    train_and_stop(run("stopped"), monkeypatch, after=14)
    train(run("stopped"), resume=True)
    for name in ("derived", "stopped"):
        assert losses(tmp_path / name) == losses(tmp_path / "stored")
        expected, trained = weights(tmp_path / "stored"), weights(tmp_path / name)
        assert all(torch.equal(expected[key], trained[key]) for key in expected)


@pytest.mark.slow
def test_rows_from_the_file_to_the_tokens_take_little_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(encoding, "MOST_STORED", 10_000)
    with (tmp_path / "long.jsonl").open("w") as file:
        for n in range(4_000):
            file.write(json.dumps({"prompt": f"{n} " + "x" * 300, "completion": "y"}) + "\n")
    encoder = encoding.Encoder(tiny.tokenizer())
    tracemalloc.start()
    train, _ = tasks.get(str(tmp_path / "long.jsonl")).validation_split(50)
    rows = encoding.encode(train, encoder, 512).rows
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(rows) > 3_000
    # The file has 1.3 MB, its tokens would take 10 MB as arrays. Measured: 1.2 MB.
    assert peak < 1_500_000
