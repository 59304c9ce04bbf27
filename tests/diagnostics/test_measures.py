"""The measures against what they are by definition, and the identities between them."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from nalora import activations
from nalora.diagnostics.measures import HISTOGRAM_EDGES, distribution, movement, token_slices


def gates(tokens=200, channels=7, spread=3.0, seed=0, dtype=torch.float32):
    return (torch.randn(tokens, channels, generator=torch.Generator().manual_seed(seed)) * spread).to(dtype)


def moved(spread=3.0, by=1.5):
    z = gates(spread=spread)
    return z, z + by * gates(spread=1.0, seed=1)


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh", "quick_gelu", "mish", "relu", "relu2"])
def test_means_are_the_definitions(name):
    """Straight from the definitions, one number at a time, in Python's floats."""
    activation = activations.get(name)
    points = activation.characteristic_points
    z, after = moved()
    mask = torch.rand(7, generator=torch.Generator().manual_seed(2))
    found = movement(z, after, activation, points).means(mask)
    wide, wide_after = z.double(), after.double()
    selection = [activation.selection(each) for each in (wide, wide_after)]
    kappa = [activation.kappa(each) for each in (wide, wide_after)]
    count = z.numel()
    phi = [activation.phi(each).abs() for each in (wide, wide_after)]
    names = ("D_sel", "kappa_drift", "D_EH", "D_EH_live", "flip", "suppressive", "positive", "severe")
    expected = dict.fromkeys(names, 0.0)
    for t in range(z.shape[0]):
        for c in range(z.shape[1]):
            expected["D_sel"] += abs(float(selection[1][t, c] - selection[0][t, c])) / count
            change = float(kappa[1][t, c] - kappa[0][t, c])
            expected["kappa_drift"] += abs(change) / count
            expected["D_EH"] += float(mask[c]) * change**2 / z.shape[0]
            weight = min(float(phi[0][t, c]), float(phi[1][t, c]), 1.0)
            expected["D_EH_live"] += weight * float(mask[c]) * change**2 / z.shape[0]
            if points is None:
                continue
            r, s = ((float(v) > points.upper) - (float(v) < points.lower) for v in (z[t, c], after[t, c]))
            expected["flip"] += (r != s) / count
            expected["suppressive"] += ((r == -1) != (s == -1)) / count
            expected["positive"] += ((r == 1) != (s == 1)) / count
            expected["severe"] += (r * s == -1) / count
    for measure, value in expected.items():
        if points is None and measure in ("flip", "suppressive", "positive", "severe"):
            assert found[measure] is None
        else:
            # torch's GELU is ½z(1 + erf) and loses digits in float32 where it is small.
            tolerance = 1e-5 if measure == "D_EH_live" else 2e-6
            assert found[measure] == pytest.approx(value, rel=tolerance, abs=1e-12), measure
    assert (points is None) == (name in ("relu", "relu2"))


def test_dead_gates_carry_d_eh_on_gelu_and_not_its_live_form():
    """1.6 % of the gates are closed for good and move there by a few per cent, as the others do where they are open."""
    gelu = activations.get("gelu")
    z = gates(2000, 64, spread=0.8, dtype=torch.float64)
    dead = torch.rand(z.shape, generator=torch.Generator().manual_seed(3)) < 0.016
    z = torch.where(dead, z - 12, z)
    after = z * (1 + 0.04 * gates(2000, 64, spread=1.0, seed=1, dtype=torch.float64))
    whole = movement(z, after, gelu, gelu.characteristic_points).means()
    # The same gates without the dead ones' movement: what is left is the others'.
    alive = movement(z, torch.where(dead, z, after), gelu, gelu.characteristic_points).means()
    assert alive["D_EH"] < 0.01 * whole["D_EH"], "dead gates carry more than 99 % of D_EH"
    assert alive["D_EH_live"] == pytest.approx(whole["D_EH_live"], rel=1e-9)
    assert 0 < whole["D_EH_live"] < whole["D_EH"]


@pytest.mark.parametrize("far", [-30.0, -200.0, -1e30])
def test_a_gate_without_output_moves_no_live_homogeneity(far):
    gelu = activations.get("gelu")
    z, after = torch.full((3, 2), far), torch.full((3, 2), far / 2)
    found = movement(z, after, gelu, gelu.characteristic_points)
    assert torch.equal(found.sums["D_EH_live"], torch.zeros(2, dtype=torch.float64))
    assert not (found.sums["D_EH"] == 0).any()


def test_on_silu_both_forms_order_movements_alike():
    """Twenty layers of other spreads and movements: the one that moved more by D_EH did so by its live form."""
    silu = activations.get("silu")
    found = []
    for seed, by in enumerate(torch.logspace(-3, 0, 20).tolist()):
        z = gates(500, 16, spread=1 + seed % 3 / 2, seed=seed)
        after = z + by * gates(500, 16, spread=1.0, seed=100 + seed)
        found.append(movement(z, after, silu, silu.characteristic_points).means())
    orders = [sorted(range(20), key=lambda i, name=name: found[i][name]) for name in ("D_EH", "D_EH_live")]
    assert orders[0] == orders[1]
    assert all(each["D_EH_live"] < each["D_EH"] for each in found)


@pytest.mark.parametrize("by", [0.01, 1.0, 8.0])
def test_flip_is_suppressive_plus_positive_minus_severe(by):
    silu = activations.get("silu")
    z, after = moved(by=by)
    found = movement(z, after, silu, silu.characteristic_points)
    assert found.sums["flip"].dtype == torch.int64
    assert torch.equal(found.sums["flip"], found.sums["suppressive"] + found.sums["positive"] - found.sums["severe"])
    assert found.sums["flip"].sum() > 0
    if by == 8.0:
        assert found.sums["severe"].sum() > 0


def test_nothing_moves_between_equal_states():
    silu = activations.get("silu")
    z = gates()
    assert set(movement(z, z.clone(), silu, silu.characteristic_points).means().values()) == {0.0}


def test_a_way_is_no_shorter_than_its_ends_are_apart():
    silu = activations.get("silu")
    way = [gates(spread=2.0, seed=seed, dtype=torch.float64) for seed in range(5)]
    points = silu.characteristic_points
    steps = [movement(a, b, silu, points) for a, b in itertools.pairwise(way)]
    walked = {name: sum(step.means()[name] for step in steps) for name in steps[0].means()}
    ends = movement(way[0], way[-1], silu, points).means()
    for name in ("D_sel", "flip", "kappa_drift", "suppressive", "positive"):
        assert walked[name] >= ends[name] > 0


def test_sums_do_not_depend_on_how_tokens_are_split():
    silu = activations.get("silu")
    z, after = moved()
    points = silu.characteristic_points
    whole = movement(z, after, silu, points)
    parts = [movement(a, b, silu, points) for a, b in zip(z.split(17), after.split(17), strict=True)]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    assert total.tokens == whole.tokens == 200
    for name in ("flip", "suppressive", "positive", "severe"):
        assert torch.equal(total.sums[name], whole.sums[name])
    # σ itself differs in its last bit between the body and the tail of a vectorised loop.
    for name in ("D_sel", "kappa_drift", "D_EH", "D_EH_live"):
        torch.testing.assert_close(total.sums[name], whole.sums[name], rtol=1e-7, atol=0)


def test_shares_and_histogram():
    silu = activations.get("silu")
    lower, upper = silu.characteristic_points
    z = gates(spread=6.0)
    found = distribution(z, (lower, upper), histogram=True)
    assert found.shares() == pytest.approx(
        [float((z < lower).double().mean()), float(((z >= lower) & (z <= upper)).double().mean()),
         float((z > upper).double().mean())], abs=1e-15
    )  # fmt: skip
    inside = torch.histc(z, 64, -8, 8)
    assert len(HISTOGRAM_EDGES) == 65
    assert torch.equal(found.sums["histogram"][1:-1], inside[1:-1].long())
    assert found.sums["histogram"].sum() == z.numel()
    assert found.sums["histogram"][0] == (z < -7.75).sum()
    assert found.sums["histogram"][-1] == (z >= 7.75).sum()
    assert distribution(z, None).shares() is None
    assert "histogram" not in distribution(z, None).sums
    twice = found + found
    assert twice.tokens == 400
    assert twice.shares() == found.shares()


def test_half_precision_is_measured_in_float32():
    silu = activations.get("silu")
    z, after = (each.bfloat16() for each in moved())
    half = movement(z, after, silu, silu.characteristic_points).means()
    assert half == movement(z.float(), after.float(), silu, silu.characteristic_points).means()


def test_gates_that_are_no_numbers_are_in_no_regime():
    silu = activations.get("silu")
    z = torch.tensor([[math.nan, 1.0, -math.inf]])
    found = distribution(z, silu.characteristic_points, histogram=True)
    assert found.sums["regimes"].sum() == 2
    assert found.sums["histogram"].sum() == 2


def test_rows_are_the_real_tokens():
    z = torch.arange(24.0).view(2, 4, 3)
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 0]]).bool()
    parts = [part for (part,) in token_slices([z], mask, 6)]
    assert [len(part) for part in parts] == [2, 2]
    assert torch.equal(torch.cat(parts), z[mask])
    assert sum(len(part) for (part,) in token_slices([z], None, 6)) == 8
