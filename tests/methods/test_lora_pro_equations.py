"""LoRA-Pro's equations against what they promise: the identity, the nearest X, and numbers at the edges."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nalora.methods import lora_pro_equations as equations


class Case:
    """A module with a known gradient G; A as PEFT draws it, B of the given size."""

    def __init__(self, seed, rank, rows, columns, size, scaling, dtype=torch.float64, batch=()):
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape):
            return torch.randn(*batch, *shape, generator=generator, dtype=torch.float64)

        self.s = scaling
        self.A = (draw(rank, columns) / columns**0.5).to(dtype)
        self.B = (draw(rows, rank) * size).to(dtype)
        self.G = draw(rows, columns).to(dtype)
        self.g_A = scaling * self.B.mT @ self.G
        self.g_B = scaling * self.G @ self.A.mT

    @property
    def factors(self):
        return self.A, self.B, self.g_A, self.g_B, self.s

    def spectra(self, damping=0.0):
        return equations.spectrum(self.B.mT @ self.B, damping), equations.spectrum(self.A @ self.A.mT, damping)

    def nearest(self):
        """P_B·G + (I − P_B)·G·P_A, with projections from QR in float64 and none of the code under test."""
        q, r = (torch.linalg.qr(each.double())[0] for each in (self.B, self.A.mT))
        G = self.G.double()
        inside = q @ (q.mT @ G)
        return inside + (G - inside) @ r @ r.mT

    def error(self, damping=None):
        stars = equations.adjusted_gradients(*self.factors, damping=damping)
        found = equations.equivalent_gradient(self.A, self.B, *stars, self.s).double()
        return ((found - self.nearest()).norm() / self.G.double().norm()).item()


@st.composite
def cases(draw, dtype=torch.float64, batch=(), sizes=(-6.0, 0.0)):
    rank = draw(st.integers(1, 8))
    return Case(
        draw(st.integers(0, 10**6)),
        rank,
        draw(st.integers(4 * rank, 48)),
        draw(st.integers(4 * rank, 48)),
        10 ** draw(st.floats(*sizes)),
        draw(st.sampled_from([0.5, 1.0, 2.0, 5.66])),
        dtype,
        batch,
    )


@given(cases())
@settings(max_examples=60, deadline=None)
def test_w_moves_along_the_nearest_gradient(case):
    assert case.error(damping=0.0) < 1e-10


# Largest of 2,000 draws: 9.4e-6 in float32, 2.0e-14 in float64.
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 5e-5), (torch.float64, 1e-13)])
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_damping_does_not_spoil_it_at_any_size_of_b(dtype, bound, data):
    assert data.draw(cases(dtype)).error() < bound


def test_damping_costs_a_small_b_no_more_than_a_large_one():
    errors = [Case(0, 8, 96, 64, size, 2.0, torch.float32).error() for size in (1e-6, 1e-4, 1e-2, 1.0)]
    assert max(errors) < 2 * min(errors) < 2e-5


@given(cases(sizes=(-2.0, 0.0)))
@settings(max_examples=60, deadline=None)
def test_x_solves_its_sylvester_equation(case):
    of_b, of_a = case.spectra()
    X = equations.nearest_coupling(case.A, case.g_A, case.s, of_b, of_a)
    gram_b, gram_a = case.B.mT @ case.B, case.A @ case.A.mT
    right = -(case.s**-2) * torch.linalg.solve(gram_b, case.g_A) @ case.A.mT
    residual = gram_b @ X + X @ gram_a - right
    assert residual.norm() < 1e-9 * right.norm()


@given(cases(sizes=(-1.5, 0.0)), st.integers(0, 10**6), st.floats(-4, 1))
@settings(max_examples=100, deadline=None)
def test_no_other_x_brings_the_gradients_nearer(case, seed, power):
    """‖g_A* − g_A‖² + ‖g_B* − g_B‖² is a convex square in X, so the least value is where no change makes it fall."""
    spectra = case.spectra()
    X = equations.nearest_coupling(case.A, case.g_A, case.s, *spectra)

    def distance(X):
        stars = equations.with_coupling(*case.factors, *spectra, X)
        return (stars[0] - case.g_A).square().sum() + (stars[1] - case.g_B).square().sum()

    change = torch.randn(X.shape, generator=torch.Generator().manual_seed(seed), dtype=X.dtype)
    change *= 10**power * X.norm() / change.norm()
    least = distance(X)
    assert distance(X + change) >= least * (1 - 1e-12)
    # The stars that are handed out are those of this X, and the square's second-order growth is the change's own.
    grown = (change @ case.A).square().sum() + (case.B @ change).square().sum()
    assert distance(X + change) == pytest.approx(float(least + grown), rel=1e-7)
    stars = equations.adjusted_gradients(*case.factors, damping=0.0)
    assert torch.allclose(stars[0], equations.with_coupling(*case.factors, *spectra, X)[0])


@given(cases(sizes=(-2.0, 0.0)), st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_any_x_moves_w_the_same_way(case, seed):
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(case.A.shape[0], case.A.shape[0], generator=generator, dtype=torch.float64)
    stars = equations.with_coupling(*case.factors, *case.spectra(), X)
    moved = equations.equivalent_gradient(case.A, case.B, *stars, case.s)
    assert (moved - case.nearest()).norm() < 1e-9 * case.G.norm()


@given(cases())
@settings(max_examples=40, deadline=None)
def test_b_times_the_inverse_times_b_is_a_projection(case):
    projection = case.B @ case.spectra()[0].inverse @ case.B.mT
    assert (projection @ projection - projection).norm() < 1e-9
    assert (projection @ case.B - case.B).norm() < 1e-9 * case.B.norm()
    assert projection.trace().item() == pytest.approx(case.A.shape[0], abs=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_the_loss_falls(dtype, data):
    case = data.draw(cases(dtype))
    stars = equations.adjusted_gradients(*case.factors)
    moved = equations.equivalent_gradient(case.A, case.B, *stars, case.s)
    projected = case.nearest().square().sum().item()  # ⟨G, P·G⟩ = ‖P·G‖² of an orthogonal projection
    assert (case.G * moved).sum().item() == pytest.approx(projected, rel=1e-4 if dtype == torch.float32 else 1e-9)


def test_a_stack_is_its_modules():
    case = Case(0, 4, 20, 24, 1e-2, 2.0, batch=(3,))
    together = equations.adjusted_gradients(*case.factors)
    for i in range(3):
        alone = equations.adjusted_gradients(case.A[i], case.B[i], case.g_A[i], case.g_B[i], case.s)
        for one, all_of_them in zip(alone, together, strict=True):
            assert torch.allclose(one, all_of_them[i], rtol=1e-10)


# ---- at the edges


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_first_step_moves_b_alone(dtype):
    case = Case(0, 8, 40, 48, 0.0, 2.0, dtype)
    g_A, g_B = equations.adjusted_gradients(*case.factors)
    assert torch.equal(g_A, torch.zeros_like(g_A))
    A = case.A.double()
    right = case.s**-2 * torch.linalg.solve(A @ A.mT, case.g_B.double().mT).mT
    assert (g_B.double() - right).norm() < 1e-5 * right.norm()
    moved = equations.equivalent_gradient(case.A, case.B, g_A, g_B, case.s).double()
    rows = torch.linalg.qr(A.mT)[0]
    assert (moved - case.G.double() @ rows @ rows.mT).norm() < 1e-5 * case.G.norm()


def test_the_inverse_of_nothing_is_nothing():
    spectrum = equations.spectrum(torch.zeros(2, 3, 3))
    assert not any(each.any() for each in (spectrum.values, spectrum.inverse))


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-20, 1e-13, 1e-12, 1e-10, 1e-8, 1e8])
def test_float32_stays_finite_at_any_size_and_so_does_its_square(size):
    case = Case(0, 8, 40, 48, size, 2.0, torch.float32)
    for star in equations.adjusted_gradients(*case.factors):
        assert star.square().sum().isfinite()


@pytest.mark.parametrize("dead", ["column of B", "row of A", "B of rank one", "A", "A and B"])
def test_a_direction_that_died_stays_finite(dead):
    case = Case(1, 4, 40, 48, 1e-3, 2.0, torch.float32)
    if dead == "column of B":
        case.B[:, 2] = 0
    elif dead == "row of A":
        case.A[1] = case.A[0]
    elif dead == "B of rank one":
        case.B[:] = case.B[:, :1]
    else:
        case.A.zero_()
        if dead == "A and B":
            case.B.zero_()
    g_A, g_B = case.s * case.B.mT @ case.G, case.s * case.G @ case.A.mT
    stars = equations.adjusted_gradients(case.A, case.B, g_A, g_B, case.s)
    assert all(star.isfinite().all() for star in stars)
    # No longer than G itself, but for the rounding that the damping lets through: 1e-3 at most was measured.
    moved = equations.equivalent_gradient(case.A, case.B, *stars, case.s)
    assert moved.norm() < 1.01 * case.G.norm()
    assert (case.G * moved).sum() >= 0


def test_a_dead_column_of_b_is_as_if_it_were_not_there():
    case = Case(2, 4, 40, 48, 1e-3, 2.0, torch.float32)
    case.B[:, 3] = case.B[:, 0]
    stars = equations.adjusted_gradients(case.A, case.B, case.s * case.B.mT @ case.G, case.g_B, case.s)
    moved = equations.equivalent_gradient(case.A, case.B, *stars, case.s).double()
    q, r = torch.linalg.qr(case.B[:, :3].double())[0], torch.linalg.qr(case.A.double().mT)[0]
    inside = q @ (q.mT @ case.G.double())
    right = inside + (case.G.double() - inside) @ r @ r.mT
    assert (moved - right).norm() < 1e-2 * right.norm()
