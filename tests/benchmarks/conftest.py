from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch

# The scripts import each other by name, as they do when one of them is run.
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
if not torch.cuda.is_available():
    pytest.importorskip("nalora.kernels.fused.gated")


@pytest.fixture
def tiny_step(tmp_path, monkeypatch):
    """The options of a quick run of training_step.py on the CPU, and what loading peers changes is undone."""
    monkeypatch.setattr(torch.cuda, "device", torch.cuda.device)
    monkeypatch.setenv("UNSLOTH_ALLOW_CPU", "1")

    def options(*only: str, **others) -> Namespace:
        settings = dict(
            shape="tiny", layers=1, batch=1, length=16, rank=4, checkpointing=False, four_bit=False, device="cpu",
            peers=None, rows=tmp_path / "rows.csv", rounds=2, steps=2, warmup=1, only=list(only), no_compiled=True,
            no_fp8=True, check=False, time_limit=None, again=False,
        )  # fmt: skip
        return Namespace(**settings | others)

    return options


@pytest.fixture
def training():
    from llamas import SHAPES, build
    from training import Training

    return Training(build(SHAPES["tiny"], device="cpu", dtype=torch.float32), 2, 16)
