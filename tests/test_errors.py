"""A count and its noun agree."""

from __future__ import annotations

import pytest

from nalora.errors import counted


@pytest.mark.parametrize(
    ("number", "said"), [(0, "0 steps"), (1, "1 step"), (2, "2 steps"), (1_000, "1,000 steps"), (1_001, "1,001 steps")]
)
def test_only_one_is_singular(number, said):
    assert counted(number, "step") == said
