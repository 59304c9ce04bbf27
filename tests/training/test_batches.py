"""None fills the last batches of an epoch and has no effect on training."""

from __future__ import annotations

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import BatchSampler

from nalora.control.tokens import IGNORED_LABEL
from nalora.runs.encoding import Collator
from nalora.runs.settings import RunSettings
from nalora.training.batches import FilledBatches, length_notices, passes_over, split_batch


@pytest.mark.parametrize("examples", range(1, 26))
@pytest.mark.parametrize("processes", [2, 3])
def test_every_example_is_dealt_once_and_every_process_has_as_many_batches(examples, processes):
    plain = BatchSampler(range(examples), batch_size=4, drop_last=False)
    filled = FilledBatches(plain, processes)
    shares = [list(BatchSamplerShard(filled, processes, rank)) for rank in range(processes)]
    assert {len(share) for share in shares} == {len(filled) // processes}
    # Read in turns it is the order of one process.
    dealt = [index for turn in zip(*shares, strict=True) for batch in turn for index in batch]
    assert [index for index in dealt if index is not None] == list(range(examples))
    assert all(len(batch) == 4 for share in shares for batch in share)


def test_a_blank_has_no_token_that_counts():
    row = {"input_ids": [5, 6, 7], "labels": [IGNORED_LABEL, 6, 7]}
    batch = Collator(pad_token_id=9)([row, None])
    assert batch["input_ids"].tolist() == [[5, 6, 7], [9, 9, 9]]
    assert batch["labels"][1].tolist() == [IGNORED_LABEL] * 3
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 0]]
    alone = Collator(pad_token_id=9)([None, None])
    assert alone["input_ids"].shape == (2, 1)
    assert not alone["attention_mask"].any()
    assert Collator(pad_token_id=9, placeholder_mask=1)([None])["attention_mask"].tolist() == [[1]]


def test_packed_rows_leave_blanks_out():
    row = {"input_ids": [5, 6], "labels": [IGNORED_LABEL, 6], "position_ids": [0, 1]}
    batch = Collator(pad_token_id=9)([row, None])
    assert batch["input_ids"].tolist() == [[5, 6]]
    assert torch.equal(batch["position_ids"], torch.tensor([[0, 1]]))


@pytest.mark.parametrize(
    ("rows", "steps", "expected"),
    [(21, 3, 1), (21, 6, 2), (21, 1, 8 / 21), (21, 5, 1 + 16 / 21), (24, 3, 1), (3, 1, 1), (3, 5, 5)],
)
def test_the_last_batch_of_a_pass_has_the_rows_that_are_left(rows, steps, expected):
    settings = RunSettings("model", "task", batch_size=8, micro_batch_size=4)
    assert passes_over(settings, rows, steps) == pytest.approx(expected)
    if float(expected).is_integer():
        assert split_batch(settings).steps(rows, expected) == steps


@pytest.mark.parametrize(
    ("changed", "noticed"),
    [({}, True), ({"warmup": 0.0}, False), ({"schedule": "constant"}, False), ({"epochs": 2.0}, False)],
)
def test_a_run_whose_only_step_is_warm_up_is_noticed(changed, noticed):
    settings = RunSettings("model", "task", batch_size=8, **{"epochs": 1.0, **changed})
    assert any("learning rate of 0" in notice for notice in length_notices(settings, 8)) == noticed


@pytest.mark.parametrize(("epochs", "expected"), [(0.4, "0.76 passes over the data: raise epochs"), (0.9, None)])
def test_a_part_of_an_epoch_is_counted_in_whole_steps(epochs, expected):
    """Of three steps an epoch, 0.9 epochs are all, and 0.4 epochs are two."""
    settings = RunSettings("model", "task", batch_size=8, epochs=epochs)
    notices = length_notices(settings, 21)
    assert [expected in notice for notice in notices] == [True] if expected else notices == []
