"""The reference statistics: right, exact in counts, constant in memory, safe from pads and non-finite values."""

from __future__ import annotations

import tracemalloc
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nalora import activations
from nalora.kernels.statistics import Sums, accumulate, reference

TAU = (-1.278464543, 1.278464543)
SILU = activations.get("silu")


class Totals(NamedTuple):
    sensitivity: torch.Tensor
    regimes: torch.Tensor
    tokens: torch.Tensor


def sums(width: int, dtype: torch.dtype = torch.float64) -> Sums:
    return Sums.zeros(1, width, dtype, torch.device("cpu")).of_block(0)


def totals(result: Sums) -> Totals:
    return Totals(*result.totals())


@given(
    activation=st.sampled_from(activations.KNOWN),
    batch=st.integers(1, 4),
    length=st.integers(1, 9),
    width=st.integers(1, 17),
    masked=st.booleans(),
    with_up=st.booleans(),
    slice_elements=st.sampled_from([1, 7, 40, 1 << 18]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=120, deadline=None)
def test_equals_the_definition(activation, batch, length, width, masked, with_up, slice_elements, seed):
    generator = torch.Generator().manual_seed(seed)
    z = 3 * torch.randn(batch, length, width, generator=generator, dtype=torch.float64)
    u = torch.randn(batch, length, width, generator=generator, dtype=torch.float64) if with_up else None
    mask = torch.rand(batch, length, generator=generator) > 0.4 if masked else None
    result = sums(width)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "_CPU_ELEMENTS", slice_elements)
        accumulate(result, z, activation, TAU, u, mask)

    real = z.reshape(-1, width) if mask is None else z[mask]
    expected = activation.derivative(real).abs()
    if u is not None:
        expected = expected * (u.reshape(-1, width) if mask is None else u[mask]).abs()
    torch.testing.assert_close(totals(result).sensitivity, expected.sum(0), rtol=1e-12, atol=1e-12)
    assert totals(result).tokens.item() == len(real)
    counts = [(real < TAU[0]).sum(), ((real >= TAU[0]) & (real <= TAU[1])).sum(), (real > TAU[1]).sum()]
    assert totals(result).regimes.tolist() == [count.item() for count in counts]


@pytest.mark.parametrize("thresholds", [(-0.5, 2.0), (0.0, 0.0), (0.5, 2.0), (-3.0, -1.0)])
def test_masked_tokens_leave_every_regime_wherever_zero_lies(thresholds):
    z = torch.randn(6, 10, dtype=torch.float64)
    mask = torch.tensor([True, False, True, True, False, False])
    masked, alone = sums(10), sums(10)
    accumulate(masked, z, SILU, thresholds, None, mask)
    accumulate(alone, z[mask], SILU, thresholds)
    assert torch.equal(totals(masked).regimes, totals(alone).regimes)


def test_strided_halves_and_interleaved_rows_need_no_copy():
    fused = torch.randn(3, 5, 24, dtype=torch.float64)
    for rows in (slice(12, 24), slice(0, None, 2)):
        strided, contiguous = sums(12), sums(12)
        accumulate(strided, fused[..., rows], SILU, TAU)
        accumulate(contiguous, fused[..., rows].contiguous(), SILU, TAU)
        assert all(torch.equal(a, b) for a, b in zip(strided, contiguous, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_reduced_in_float32(dtype):
    z = (2 * torch.randn(4000, 8)).to(dtype)
    result = sums(8, torch.float32)
    accumulate(result, z, SILU, TAU)
    exact = SILU.derivative(z.double()).abs().sum(0)
    torch.testing.assert_close(totals(result).sensitivity.double(), exact, rtol=1e-6, atol=0)
    assert totals(result).regimes.tolist()[0] == (z.double() < TAU[0]).sum().item()


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["silu", "relu"])
def test_one_non_finite_value_is_seen(poison, name):
    z = torch.randn(50, 6)
    z[17, 3] = poison
    result = sums(6, torch.float32)
    accumulate(result, z, activations.get(name), TAU)
    assert not torch.isfinite(totals(result).sensitivity).any()


@pytest.mark.parametrize("with_up", [False, True])
def test_what_pads_carry_does_not_matter(with_up):
    z, u = torch.randn(8, 6), torch.randn(8, 6)
    mask = torch.arange(8) < 5
    clean = sums(6, torch.float32)
    accumulate(clean, z[:5], SILU, TAU, u[:5] if with_up else None)
    z[5:], u[5:] = float("nan"), float("inf")
    padded = sums(6, torch.float32)
    accumulate(padded, z, SILU, TAU, u if with_up else None, mask)
    torch.testing.assert_close(totals(padded).sensitivity, totals(clean).sensitivity)
    assert torch.equal(totals(padded).regimes, totals(clean).regimes)


def test_an_empty_batch_adds_nothing():
    result = sums(6)
    accumulate(result, torch.zeros(0, 4, 6, dtype=torch.float64), SILU, TAU)
    accumulate(result, torch.ones(2, 4, 6, dtype=torch.float64), SILU, TAU, None, torch.zeros(2, 4, dtype=torch.bool))
    assert not totals(result).tokens
    assert not totals(result).sensitivity.any()
    assert not totals(result).regimes.any()


def test_counts_stay_exact_past_two_to_the_24():
    """Four passes of 2²² + 1 values each: float32 would have lost the odd ones."""
    result = sums(1, torch.float32)
    z = torch.full((2**22 + 1, 1), 5.0)
    for _ in range(5):
        accumulate(result, z, SILU, TAU)
    assert totals(result).regimes.tolist() == [0, 0, 5 * (2**22 + 1)]
    assert totals(result).tokens.item() == 5 * (2**22 + 1) > 2**24


def test_a_million_tokens_add_nothing_that_grows():
    """Peak extra memory does not depend on the number of tokens; measured by an allocation-counting mode."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.bytes = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and not result._is_view():
                inputs = [a.data_ptr() for a in args if isinstance(a, torch.Tensor)]
                if result.data_ptr() not in inputs:
                    self.bytes = max(self.bytes, result.numel() * result.element_size())
            return result

    largest = {}
    result = sums(16, torch.float32)
    for tokens in (50_000, 1_000_000):
        z = torch.randn(tokens, 16)
        tracemalloc.start()
        with Largest() as seen:
            accumulate(result, z, SILU, TAU)
        python_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert python_bytes < 1_000_000
        largest[tokens] = seen.bytes
    assert largest[1_000_000] == largest[50_000] <= 4 * reference._CPU_ELEMENTS
    assert totals(result).tokens.item() == 1_050_000
