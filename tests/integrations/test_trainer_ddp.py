"""Trainer under DistributedDataParallel: two ranks decide as one, after the gradients were reduced.

The ranks are processes of their own that run this file as a script.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from ranks import results_of_two
from test_trainer import difference, make_trainer, rows, train

SPACES = ("gradient", "update")


def run(folder, ranks: int) -> dict:
    """6 optimizer steps of 8 sequences each, in two micro-batches per rank."""
    settings = dict(per_device_train_batch_size=4 // ranks, gradient_accumulation_steps=2)
    return {space: train(make_trainer(folder, data=rows(48), **settings), space) for space in SPACES}


@pytest.mark.slow
def test_two_ranks_are_one(tmp_path):
    first, second = results_of_two(__file__, tmp_path)
    expected = run(tmp_path, ranks=1)
    for space in SPACES:
        for one, other in zip(first[space], second[space], strict=True):
            assert all(torch.equal(one[key], other[key]) for key in one)
        assert difference(expected[space], first[space]) < 1e-9


if __name__ == "__main__":
    torch.save(run(sys.argv[1], ranks=2), Path(sys.argv[1]) / f"rank-{os.environ['RANK']}.pt")
