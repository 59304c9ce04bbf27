from __future__ import annotations

import warnings

import pytest
import torch


@pytest.fixture(autouse=True)
def _same_seed_everywhere():
    torch.manual_seed(0)
    warnings.filterwarnings("ignore", message="nalora: Adam")
