"""The running sums of a block: views of stacked sums, totals over parts, and exact counts."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from nalora.kernels.statistics.sums import Sums, flatten

CPU = torch.device("cpu")


@given(st.integers(1, 3), st.integers(1, 200), st.integers(0, 5), st.integers(0, 2**20))
def test_totals_add_up_all_parts_and_every_gate_has_one_regime(blocks, width, parts, seed):
    """A kernel on a GPU writes several parts; here they are filled with random counts."""
    zeros = Sums.zeros(blocks, width, torch.float64, CPU)
    generator = torch.Generator().manual_seed(seed)
    shapes = [(blocks, parts, *tensor.shape[2:]) for tensor in zeros]
    tokens = torch.randint(0, 100, shapes[2], generator=generator)
    outside = torch.zeros(shapes[1], dtype=torch.int64)
    outside[:, :, 0] = torch.randint(0, 1 + width // 2, (blocks, parts, 2), generator=generator) * tokens[..., None]
    sums = Sums(torch.rand(shapes[0], generator=generator, dtype=torch.float64), outside, tokens)
    sensitivity, regimes, total = sums.totals()
    torch.testing.assert_close(sensitivity, sums.sensitivity.sum(1))
    assert torch.equal(total, tokens.sum(1))
    assert torch.equal(regimes.sum(-1), total * width)
    assert torch.equal(regimes[:, [0, 2]], outside.sum((1, 2)))


def test_a_block_of_stacked_sums_is_a_view():
    stacked = Sums.zeros(3, 8, torch.float32, CPU)
    for tensor in stacked.of_block(1):
        tensor += 1
    assert [tensor.flatten(1).any(1).tolist() for tensor in stacked] == [[False, True, False]] * 3
    stacked.of_block(1).clear()
    assert not any(tensor.any() for tensor in stacked)


def test_counts_are_exact_beyond_the_integers_of_float32():
    sums = Sums.zeros(1, 1, torch.float32, CPU)
    sums.tokens.add_(2**24)
    sums.tokens.add_(1)
    assert sums.totals()[2].item() == 2**24 + 1


def test_flatten_keeps_tokens_mask_and_second_factor_in_one_order():
    z = torch.arange(24.0).view(2, 3, 4)
    mask = torch.tensor([[1, 0, 1], [0, 1, 1]], dtype=torch.bool)
    flat, u, flat_mask = flatten(z, 2 * z, mask)
    assert flat.shape == (6, 4)
    assert torch.equal(u, 2 * flat)
    assert torch.equal(flat[flat_mask], z[mask])
    assert flatten(z, None, None)[1:] == (None, None)
