"""The paper's statements about its equations, checked as properties."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nalora import equations as eq
from nalora.activations import KNOWN, get

settings.register_profile("nalora", deadline=None)
settings.load_profile("nalora")

SILU = get("silu")
by_activation = pytest.mark.parametrize("activation", KNOWN, ids=lambda activation: activation.name)


def vectors(count, low=-30.0, high=30.0, size=6):
    """`count` float64 vectors of one length."""
    number = st.floats(low, high, allow_subnormal=False)
    values = st.lists(number, min_size=count * size, max_size=count * size)
    return values.map(lambda v: torch.tensor(v, dtype=torch.float64).view(count, size).unbind())


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


# Section 3: selection and its mismatch


def test_selection_weight_times_z_is_phi_and_continues_through_zero():
    z = torch.cat((torch.linspace(-5, 5, 101, dtype=torch.float64), torch.tensor([1e-12, -1e-12, 0.0, -0.0])))
    s = eq.selection_weight(z, SILU.phi(z), SILU.derivative(z))
    torch.testing.assert_close(s, torch.sigmoid(z), rtol=1e-14, atol=0)
    torch.testing.assert_close(s * z, SILU.phi(z), rtol=1e-14, atol=0)


def test_selection_weight_has_a_finite_gradient_at_zero():
    z = torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64, requires_grad=True)
    eq.selection_weight(z, SILU.phi(z), SILU.derivative(z)).sum().backward()
    assert z.grad.isfinite().all()


@by_activation
@given(vectors(4))
def test_decomposition_is_exact(activation, values):
    z_tar, u_tar, z_lora, u_lora = values
    terms = eq.mismatch_decomposition(*values, phi=activation.phi, selection=activation.selection)
    utility = eq.channel_utility(activation.phi(z_tar), u_tar) - eq.channel_utility(activation.phi(z_lora), u_lora)
    largest = sum(term.abs() for term in terms)
    # relu2's utility is of degree two in z, hence the selection weight in the scale
    weight = 1 + activation.selection(z_tar).abs() + activation.selection(z_lora).abs()
    scale = largest + weight * (z_tar.abs() + z_lora.abs()) * (u_tar.abs() + u_lora.abs())
    assert ((terms.total - utility).abs() <= 1e-12 * scale + 1e-300).all()


def test_decomposition_names_the_terms_it_returns():
    z, u = randn(2, 8)
    same = {"phi": SILU.phi, "selection": SILU.selection}
    only_view = eq.mismatch_decomposition(z, u + 1, z, u, **same)
    assert not only_view.residual_through_view.any()
    assert not only_view.selection_mismatch.any()
    torch.testing.assert_close(only_view.view_mismatch, SILU.phi(z))

    step = torch.full_like(z, 0.5)
    only_gate = eq.mismatch_decomposition(z + step, u, z, u, **same)
    assert not only_gate.view_mismatch.any()
    torch.testing.assert_close(only_gate.residual_through_view, torch.sigmoid(z + step) * step * u)
    linear = eq.mismatch_decomposition(z + step, u, z, u, phi=lambda x: x, selection=torch.ones_like)
    assert not linear.selection_mismatch.any()
    torch.testing.assert_close(linear.total, step * u)


@by_activation
@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
@given(vectors(4))
def test_bound_holds_in_every_norm(activation, p, values):
    z_tar, u_tar, z_lora, u_lora = values
    bound = eq.mismatch_bound(*values, phi=activation.phi, selection=activation.selection, p=p)
    mismatch = activation.phi(z_tar) * u_tar - activation.phi(z_lora) * u_lora
    assert torch.linalg.vector_norm(mismatch, p) <= bound * (1 + 1e-12) + 1e-12


@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
def test_bound_is_an_equality_for_equal_channels(p):
    """One constant sign and size per vector leaves the triangle inequality nothing to lose."""
    z_tar, u_tar, z_lora, u_lora = (torch.full((3, 7), v, dtype=torch.float64) for v in (2.0, 3.0, 1.0, 2.0))
    bound = eq.mismatch_bound(z_tar, u_tar, z_lora, u_lora, phi=SILU.phi, selection=SILU.selection, p=p)
    mismatch = SILU.phi(z_tar) * u_tar - SILU.phi(z_lora) * u_lora
    torch.testing.assert_close(bound, torch.linalg.vector_norm(mismatch, p, dim=-1))


def test_bound_reduces_the_dimension_it_gets():
    values = randn(4, 5, 3)
    along_first = eq.mismatch_bound(*values, phi=SILU.phi, selection=SILU.selection, dim=0)
    along_last = eq.mismatch_bound(*values.transpose(1, 2), phi=SILU.phi, selection=SILU.selection)
    torch.testing.assert_close(along_first, along_last)
    assert along_first.shape == (3,)


@given(vectors(4, -15, 15))
def test_selection_mismatch_obeys_the_mean_value_theorem(values):
    """prop:sensitivity_weighted_mismatch: σ′ falls away from 0, so its range on a segment is known."""
    z_tar, _, z_lora, u_lora = values
    term = eq.mismatch_decomposition(*values, phi=SILU.phi, selection=SILU.selection).selection_mismatch

    def slope(z):
        return torch.sigmoid(z) * torch.sigmoid(-z)

    ends = torch.stack((slope(z_tar), slope(z_lora)))
    inside = z_tar * z_lora < 0
    steepest = torch.where(inside, 0.25, ends.amax(0))
    factor = (z_tar - z_lora) * z_lora * u_lora
    bounds = torch.stack((ends.amin(0) * factor, steepest * factor)).sort(0).values
    slack = 1e-15 * (z_lora * u_lora).abs() + 1e-12 * factor.abs() * steepest
    assert (bounds[0] - slack <= term).all()
    assert (term <= bounds[1] + slack).all()


# Section 3: gate sensitivity, effective homogeneity, temporal margin


def test_gate_sensitivity_is_the_gates_factor_in_the_weight_gradient():
    """eq:gate_grad_main: ∇W_g = (g ⊙ u ⊙ φ′(z)) xᵀ."""
    x, u, g = randn(5), randn(7, seed=1), randn(7, seed=2)
    gate = randn(7, 5, seed=3).requires_grad_()
    z = gate @ x
    (g * eq.channel_utility(SILU.phi(z), u)).sum().backward()
    sensitivity = eq.gate_sensitivity(SILU.derivative(z.detach()))
    torch.testing.assert_close(gate.grad.abs(), ((g * u).abs() * sensitivity).outer(x.abs()))


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh", "quick_gelu", "mish"])
@given(z=vectors(1, -4.5, 8), u=st.floats(0.1, 5))
def test_chi_is_the_measured_elasticity(name, z, u):
    """prop:local_scaling_main, with d log|h(αx)| / d log α measured by autograd at α = 1."""
    activation = get(name)
    z = z[0][z[0].abs() > 1e-3]
    log_alpha = torch.zeros_like(z, requires_grad=True)
    alpha = log_alpha.exp()
    h = activation.phi(alpha * z) * (alpha * u)
    (elasticity,) = torch.autograd.grad(h.abs().log().sum(), log_alpha)
    torch.testing.assert_close(activation.chi(z), elasticity, rtol=1e-9, atol=1e-9)
    literal = eq.chi(eq.kappa(z, activation.phi(z), activation.derivative(z)))
    torch.testing.assert_close(literal, elasticity, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh", "quick_gelu", "mish"])
def test_homogeneity_moves_at_most_lipschitz_times_the_gate(name):
    """eq:eh_drift_bound_main, with L_κ measured on a fine grid of [−6, 6]."""
    activation = get(name)
    grid = torch.linspace(-6, 6, 24_001, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(activation.kappa(grid).sum(), grid)
    lipschitz = slope.abs().max()
    before, after = 12 * torch.rand(2, 50_000, dtype=torch.float64) - 6
    moved = (activation.chi(after) - activation.chi(before)).abs()
    assert (moved <= 1.0001 * lipschitz * (after - before).abs() + 1e-12).all()
    steps = activation.chi(grid.detach()).diff().abs() / grid.detach().diff()
    assert steps.max() > 0.999 * lipschitz


@given(vectors(2, -2, 2, size=40), st.floats(1e-3, 3))
def test_margin_bounds_the_flips(values, tau):
    """eq:margin_flip_bound on the empirical distribution."""
    before, after = values
    flips = (before.sign() != after.sign()).double().mean()
    assert flips <= (before.abs() <= tau).double().mean() + ((after - before).abs() > tau).double().mean()


def test_margin_bound_on_regime_crossings_of_a_real_step():
    """The same with D = z − τ_z, the score whose sign is the positive regime."""
    z = 2 * randn(20_000)
    upper = SILU.characteristic_points.upper
    before, after = z - upper, z + 0.1 * randn(20_000, seed=1) - upper
    flips = (before.sign() != after.sign()).double().mean()
    bounds = [
        (before.abs() <= tau).double().mean() + ((after - before).abs() > tau).double().mean()
        for tau in (0.02, 0.1, 0.2, 0.3)
    ]
    assert 0 < flips <= min(bounds) < 0.2


def test_homogeneity_movement_is_a_mean_over_tokens_of_a_weighted_sum_over_channels():
    before, after, weight = randn(2, 3, 5), randn(2, 3, 5, seed=1), torch.rand(5, dtype=torch.float64)
    by_hand = sum(
        (weight[c] * (after[b, s, c] - before[b, s, c]) ** 2) / 6 for b in range(2) for s in range(3) for c in range(5)
    )
    torch.testing.assert_close(eq.homogeneity_movement(before, after, weight), by_hand)
    per_token = weight.expand(2, 3, 5)
    torch.testing.assert_close(eq.homogeneity_movement(before, after, per_token), by_hand)
    assert eq.homogeneity_movement(before, before, weight) == 0
    terms = eq.homogeneity_movement(before, after, weight, reduction="none")
    torch.testing.assert_close(terms.sum() / 6, by_hand)


# Section 4.1: the mask


def test_channel_score_is_the_mean_however_the_tokens_were_split():
    k = eq.gate_sensitivity(SILU.derivative(randn(3, 64, 10)))
    whole = eq.channel_score(k.sum(1), torch.full((3,), 64))
    parts = eq.channel_score(k[:, :20].sum(1) + k[:, 20:].sum(1), torch.tensor([20, 20, 20]) + 44)
    torch.testing.assert_close(whole, k.mean(1))
    torch.testing.assert_close(parts, whole)


def test_channel_score_without_tokens_is_not_finite_and_spares_the_other_blocks():
    score = eq.channel_score(torch.tensor([[0.0, 1.0], [4.0, 6.0]]), torch.tensor([0, 2]))
    assert not score[0].isfinite().any()
    assert score[1].tolist() == [2.0, 3.0]
    assert score.dtype == torch.float32


@given(values=st.lists(st.floats(0, 1.1), min_size=1, max_size=40), keep=st.floats(0.01, 1))
def test_threshold_agrees_with_torch_quantile(values, keep):
    k = torch.tensor(values, dtype=torch.float64)
    torch.testing.assert_close(
        eq.quantile_threshold(k, keep), torch.quantile(k, 1 - keep, keepdim=True), rtol=1e-12, atol=1e-12
    )


def test_threshold_is_taken_per_block():
    k = randn(4, 3, 101)
    threshold = eq.quantile_threshold(k, 0.3)
    torch.testing.assert_close(threshold, torch.quantile(k, 0.7, dim=-1, keepdim=True))
    assert threshold.shape == (4, 3, 1)


def test_threshold_works_where_torch_quantile_refuses():
    k = torch.rand(2, 257).bfloat16()
    with pytest.raises(RuntimeError, match="dtype"):
        torch.quantile(k, 0.7)
    threshold = eq.quantile_threshold(k, 0.3)
    assert threshold.dtype == torch.bfloat16
    reference = torch.quantile(k.double(), 0.7, dim=-1, keepdim=True)
    torch.testing.assert_close(threshold.double(), reference, rtol=2**-8, atol=0)


def test_keeping_all_puts_the_threshold_at_the_minimum():
    k = randn(3, 50)
    assert torch.equal(eq.quantile_threshold(k, 1.0), k.amin(-1, keepdim=True))


@given(values=st.lists(st.floats(0, 1.1), min_size=2, max_size=40), keep=st.floats(0.01, 1))
def test_mask_is_soft_and_grows_with_the_score(values, keep):
    k = torch.tensor(values, dtype=torch.float64)
    threshold = eq.quantile_threshold(k, keep)
    mask = eq.soft_mask(k, threshold, 20.0)
    assert ((mask > 0) & (mask < 1)).all()
    assert (mask[k.argsort()].diff() >= -1e-15).all()  # torch's vector and scalar σ differ in the last bit
    assert torch.equal(mask > 0.5, k > threshold) or (k - threshold).abs().min() < 1e-15


def test_mask_keeps_the_requested_ratio():
    k = torch.rand(1000, dtype=torch.float64)
    mask = eq.soft_mask(k, eq.quantile_threshold(k, 0.3), 20.0)
    assert (mask > 0.5).sum() == 300
    assert eq.soft_mask(torch.tensor(0.4), torch.tensor(0.4), 20.0) == 0.5
    assert eq.soft_mask(torch.tensor(0.45), torch.tensor(0.4), 20.0).item() == pytest.approx(1 / (1 + math.exp(-1)))


@given(vectors(2, -2, 2), st.floats(0, 0.999))
def test_ema_is_its_formula_and_rests_at_its_fixed_point(values, decay):
    previous, new = values
    torch.testing.assert_close(eq.ema(previous, new, decay), decay * previous + (1 - decay) * new)
    assert torch.equal(eq.ema(new, new, decay), new)


def test_ema_closes_the_gap_geometrically():
    mask, target = torch.ones(3, dtype=torch.float64), torch.tensor([0.05, 0.5, 0.95], dtype=torch.float64)
    for _ in range(25):
        mask = eq.ema(mask, target, 0.9)
    torch.testing.assert_close(mask, target + 0.9**25 * (1 - target))


# Section 4.2: the step scales


@given(vectors(1, -4, 4, size=50))
def test_every_z_is_in_one_regime(values):
    counts = eq.regime_counts(values[0], -1.278464543, 1.278464543)
    assert counts.dtype == torch.int64
    assert counts.sum() == 50
    shares = eq.regime_shares(counts, torch.float64)
    assert shares.sum().item() == pytest.approx(1, abs=1e-15)
    assert shares[1] == (values[0].abs() <= 1.278464543).double().mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_thresholds_themselves_are_responsive(dtype):
    lower, upper = SILU.characteristic_points
    edge = torch.tensor([lower, upper], dtype=dtype)
    assert eq.regime_counts(edge, lower, upper).tolist() == [0, 2, 0]
    out = torch.stack((edge.nextafter(edge - 1), edge.nextafter(edge + 1)))
    assert eq.regime_counts(out, lower, upper).tolist() == [1, 2, 1]


def test_regimes_are_counted_along_a_dimension():
    z = torch.tensor([[-2.0, 0.0], [-2.0, 2.0], [0.0, 2.0]])
    assert eq.regime_counts(z, -1, 1, dim=0).tolist() == [[2, 0], [1, 1], [0, 2]]


def test_nan_is_in_no_regime():
    assert eq.regime_counts(torch.tensor([float("nan"), -2, 0, 2]), -1, 1).tolist() == [1, 1, 1]


def test_shares_are_taken_per_block():
    counts = torch.tensor([[1, 2, 1], [0, 0, 10**12]])
    assert eq.regime_shares(counts).tolist() == [[0.25, 0.5, 0.25], [0, 0, 1]]
    assert eq.regime_shares(counts).dtype == torch.float32


@pytest.mark.parametrize(
    ("shares", "penalty", "a"),
    [
        ((0.0, 1.0, 0.0), 1.0, 1.0),
        ((1.0, 0.0, 0.0), 1.0, 0.0),
        ((0.0, 0.0, 1.0), 1.0, 0.0),
        ((0.25, 0.5, 0.25), 1.0, 0.25),
        ((0.25, 0.5, 0.25), 0.5, 0.375),
        ((0.0, 0.5, 0.5), 2.0, 0.0),
    ],
)
def test_regime_score(shares, penalty, a):
    assert eq.regime_score(torch.tensor(shares), penalty).item() == pytest.approx(a)


@pytest.mark.parametrize(
    ("projection", "expected"),
    [  # tab:hyperparams at a = 0, 0.1, 0.25, 0.5, 0.75, 1
        ((0.40, 0.80, 1.50), (0.80, 0.80, 0.80, 1.0, 1.20, 1.40)),
        ((0.30, 0.80, 1.40), (0.80, 0.80, 0.85, 1.0, 1.15, 1.30)),
        ((0.20, 0.85, 1.30), (0.85, 0.85, 0.90, 1.0, 1.10, 1.20)),
        ((2.00, 0.80, 1.50), (0.80, 0.80, 0.80, 1.0, 1.50, 1.50)),  # not the paper's: its s_max never binds
    ],
)
def test_step_scale_table(projection, expected):
    a = torch.tensor([0.0, 0.1, 0.25, 0.5, 0.75, 1.0], dtype=torch.float64)
    torch.testing.assert_close(eq.step_scale(a, *projection), torch.tensor(expected, dtype=torch.float64))


def test_nothing_waits_for_the_device():
    """A meta tensor has no data: anything that reads a value or branches on one raises."""
    z, u = torch.empty(2, 4, 8, 16, device="meta").unbind()
    functions = {"phi": torch.nn.functional.silu, "selection": torch.sigmoid}
    eq.mismatch_decomposition(z, u, u, z, **functions)
    eq.mismatch_bound(z, u, u, z, **functions)
    chi = eq.chi(eq.kappa(z, u, u, 1e-6))
    eq.homogeneity_movement(chi, chi, u)
    eq.selection_weight(z, eq.channel_utility(z, u), u)
    score = eq.channel_score(eq.gate_sensitivity(z).sum(1), torch.empty(4, dtype=torch.int64, device="meta"))
    mask = eq.ema(score, eq.soft_mask(score, eq.quantile_threshold(score, 0.3), 20.0), 0.9)
    a = eq.regime_score(eq.regime_shares(eq.regime_counts(z, -1.0, 1.0)), 1.0)
    assert mask.shape == (4, 16)
    assert eq.step_scale(a, 0.4, 0.8, 1.5).shape == ()


def test_the_regime_score_is_clamped_at_both_ends():
    shares = torch.tensor([[0.0, 0.5, 0.5], [0.0, 0.1, 0.9], [0.2, 0.5, 0.3]], dtype=torch.float64)
    assert eq.regime_score(shares, 1.0).tolist() == pytest.approx([0.0, 0.0, 0.2])
    assert eq.regime_score(shares, -3.0).tolist() == pytest.approx([1.0, 1.0, 1.0])


def test_the_bound_is_in_the_euclidean_norm_by_default():
    z, u, z_lora, u_lora = (randn(4, 6, seed=seed) for seed in range(4))
    functions = {"phi": SILU.phi, "selection": SILU.selection}
    assert torch.equal(
        eq.mismatch_bound(z, u, z_lora, u_lora, **functions),
        eq.mismatch_bound(z, u, z_lora, u_lora, p=2.0, **functions),
    )


def test_kappa_with_the_papers_epsilon_has_its_poles_where_phi_is_minus_epsilon():
    epsilon = 1e-6
    z = torch.tensor([-2.000002e-6, -16.6], dtype=torch.float64)
    assert (eq.kappa(z, SILU.phi(z), SILU.derivative(z), epsilon).abs() > 1e2).all()
    assert (eq.kappa(z, SILU.phi(z), SILU.derivative(z)).abs() < 20).all()


def test_a_score_is_computed_for_any_number_of_blocks_at_once():
    one = eq.channel_score(torch.tensor([2.0, 4.0]), torch.tensor(2))
    several = eq.channel_score(torch.tensor([[[2.0, 4.0]] * 3] * 2), torch.full((2, 3), 2))
    assert one.tolist() == [1.0, 2.0]
    assert several.tolist() == [[[1.0, 2.0]] * 3] * 2


def test_shares_are_in_the_precision_that_is_requested():
    shares = eq.regime_shares(torch.tensor([[1, 1, 1]]), torch.float64)
    assert shares.dtype == torch.float64
    assert shares.tolist() == [[1 / 3] * 3]
