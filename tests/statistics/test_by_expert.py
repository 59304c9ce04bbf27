"""Sums of experts: each expert's rows are added as the reference adds those of a dense block."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nalora import activations
from nalora.kernels.statistics import Sums, by_expert, reference

SILU, BOUNDS, EXPERTS = activations.get("silu"), (-1.25, 1.25), 5


def add_one_by_one(sums, experts, z, u, mask):
    for expert in range(EXPERTS):
        rows = experts == expert
        parts = (None if tensor is None else tensor[rows] for tensor in (u, mask))
        reference.accumulate(sums.of_block(expert), z[rows], SILU, BOUNDS, *parts)


def zeros(width: int) -> Sums:
    return Sums.zeros(EXPERTS, width, torch.float64, torch.device("cpu"), parts=1)


@settings(deadline=None, max_examples=25)
@given(
    counts=st.lists(st.integers(0, 6), min_size=EXPERTS, max_size=EXPERTS),
    width=st.integers(1, 70),
    with_u=st.booleans(),
    with_mask=st.booleans(),
    slices=st.integers(1, 300),
    seed=st.integers(0, 99),
)
def test_every_way_adds_what_the_reference_adds(counts, width, with_u, with_mask, slices, seed):
    """On a CPU expert by expert, on a device in segments, whatever slices the rows are cut into."""
    generator = torch.Generator().manual_seed(seed)
    experts = torch.repeat_interleave(torch.arange(EXPERTS), torch.tensor(counts))
    both = 2 * torch.randn(len(experts), 2 * width, dtype=torch.float64, generator=generator)
    z, u = both[:, :width], both[:, width:] if with_u else None
    mask = torch.rand(len(experts), generator=generator) > 0.4 if with_mask else None
    if mask is not None:
        both[~mask] = torch.nan  # what padding holds must not matter
    expected, on_cpu, on_device = zeros(width), zeros(width), zeros(width)
    for _ in range(2):  # the second pass adds to the first
        add_one_by_one(expected, experts, z, u, mask)
        by_expert.accumulate_by_expert(reference.accumulate, on_cpu, experts, z, SILU, BOUNDS, u, mask)
        ends = torch.searchsorted(experts, torch.arange(EXPERTS + 1))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(by_expert, "_DEVICE_ELEMENTS", slices)
            by_expert.add_segments(on_device, ends, z, SILU, BOUNDS, u, mask)
    for sums in (on_cpu, on_device):
        torch.testing.assert_close(sums.sensitivity, expected.sensitivity, rtol=1e-12, atol=1e-12)
        assert torch.equal(sums.tokens, expected.tokens)
        assert torch.equal(sums.outside.sum((1, 2)), expected.outside.sum((1, 2)))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_value_that_is_not_finite_marks_its_expert_alone(bad):
    z = torch.randn(5, 3, dtype=torch.float64)
    z[2, 1] = bad
    sums = zeros(3)
    by_expert.add_segments(sums, torch.tensor([0, 2, 2, 4, 4, 5]), z, SILU, BOUNDS, None, None)
    assert sums.sensitivity.sum((1, 2)).isfinite().tolist() == [True, True, False, True, True]
