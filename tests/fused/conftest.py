from __future__ import annotations

import pytest
import torch


@pytest.fixture
def graphs():
    """The number of graphs that torch.compile has made since the test began."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield lambda: torch._dynamo.utils.counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
