"""The activations against 60-digit arithmetic, autograd, torch's own functions and the design's table."""

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from nalora.activations import KNOWN, clamped, get, identify
from nalora.errors import NALoRAError

settings.register_profile("nalora", deadline=None)
settings.load_profile("nalora")

SMOOTH = ("silu", "gelu", "gelu_tanh", "quick_gelu", "mish")
by_activation = pytest.mark.parametrize("activation", KNOWN, ids=lambda activation: activation.name)

FUNCTIONAL = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda z: functional.gelu(z, approximate="tanh"),
    "quick_gelu": lambda z: z * torch.sigmoid(1.702 * z),
    "relu": functional.relu,
    "relu2": lambda z: functional.relu(z) ** 2,
    "mish": functional.mish,
}

EXACT = {
    "silu": lambda z: z / (1 + mpmath.exp(-z)),
    "gelu": lambda z: z * mpmath.erfc(-z / mpmath.sqrt(2)) / 2,
    "gelu_tanh": lambda z: z / (1 + mpmath.exp(-2 * mpmath.sqrt(2 / mpmath.pi) * (z + mpmath.mpf("0.044715") * z**3))),
    "quick_gelu": lambda z: z / (1 + mpmath.exp(-mpmath.mpf("1.702") * z)),
    "mish": lambda z: z * mpmath.tanh(mpmath.log1p(mpmath.exp(z))),
}

POINTS = {
    "silu": (-1.278464543, 1.278464543),
    "gelu": (-0.751791525, 0.839923676),
    "gelu_tanh": (-0.752461422, 0.839948541),
    "quick_gelu": (-0.751154255, 0.751154255),
    "mish": (-1.192431215, 0.877238307),
}


def line(low=-80.0, high=80.0, count=16_001, dtype=torch.float64):
    return torch.linspace(low, high, count, dtype=torch.float64).to(dtype)


@by_activation
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_phi_is_torchs(activation, dtype):
    z = line(dtype=dtype)
    torch.testing.assert_close(activation.phi(z), FUNCTIONAL[activation.name](z), rtol=0, atol=0)


@pytest.mark.parametrize("name", SMOOTH)
def test_closed_forms_against_60_digits(name):
    """Relative accuracy everywhere but at a function's own zeros, down to z = −80 where φ is 1e-1390."""
    activation, exact = get(name), EXACT[name]
    z = torch.cat((line(-80, 80, 33), line(-3, 3, 25), torch.tensor([-12.3, -6.4, 1e-5], dtype=torch.float64)))
    z = z[z != 0]
    with mpmath.workdps(60):
        points = [mpmath.mpf(x) for x in z.tolist()]
        phi = [exact(x) for x in points]
        # The tails span 1e-1390, so differentiate log|φ|, which is tame: κ = z·(log|φ|)′.
        kappa = [x * mpmath.diff(lambda y: mpmath.log(abs(exact(y))), x, h=mpmath.mpf(10) ** -25) for x in points]
        expected = {
            "selection": [p / x for p, x in zip(phi, points, strict=True)],
            "derivative": [p * k / x for p, k, x in zip(phi, kappa, points, strict=True)],
            "kappa": kappa,
            "chi": [1 + k for k in kappa],
        }
    for what, values in expected.items():
        reference = torch.tensor([float(v) for v in values], dtype=torch.float64)
        slack = 1e-13 if what in ("kappa", "chi") else 1e-15 * z.abs().clamp(min=1) * activation.selection(z)
        gap = (getattr(activation, what)(z) - reference).abs()
        assert (gap <= 2e-12 * reference.abs() + slack + 1e-300).all(), what


@by_activation
@given(values=st.lists(st.floats(-30, 30), min_size=1, max_size=20))
def test_derivative_is_autograds(activation, values):
    z = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(FUNCTIONAL[activation.name](z).sum(), z)
    torch.testing.assert_close(activation.derivative(z.detach()), slope, rtol=1e-12, atol=1e-14)


@by_activation
@given(values=st.lists(st.floats(-4.5, 30), min_size=1, max_size=20))
def test_kappa_is_its_definition(activation, values):
    z = torch.tensor(values, dtype=torch.float64)
    phi, slope = activation.phi(z), activation.derivative(z)
    alive = phi.abs() > 1e-12  # elsewhere zφ′/φ is 0/0
    ratio = (z * slope / phi)[alive]
    torch.testing.assert_close(activation.kappa(z)[alive], ratio, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(activation.selection(z) * z, phi, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(activation.chi(z), 1 + activation.kappa(z), rtol=0, atol=0)


@by_activation
@pytest.mark.parametrize(
    ("dtype", "reach", "tolerance"),
    [(torch.float32, 80, 3e-6), (torch.bfloat16, 80, 2**-8), (torch.float16, 60, 2**-10)],
)
def test_narrow_types_follow_float64(activation, dtype, reach, tolerance):
    """Finite and as near to float64 as the type can say; float16 cannot hold tanh GELU's κ(−80) = −1.1e5."""
    z = line(-reach, reach, dtype=dtype)
    for what in ("phi", "derivative", "selection", "kappa"):
        narrow, wide = getattr(activation, what)(z), getattr(activation, what)(z.double())
        assert narrow.dtype == dtype
        assert narrow.isfinite().all(), what
        if what != "phi":  # phi is torch's own
            gap = (narrow.double() - wide).abs()
            assert (gap <= tolerance * wide.abs().clamp(min=1)).all(), what


@pytest.mark.parametrize("name", SMOOTH)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_far_out_the_smooth_gates_are_shut_or_open(name, dtype):
    """eᶻ overflows and underflows at ±1000, in float64 too; κ falls at least as fast as 1 + z on the left."""
    activation, z = get(name), torch.tensor([-1000.0, 1000.0], dtype=dtype)
    for what in ("derivative", "selection"):
        assert getattr(activation, what)(z).tolist() == [0, 1], what
    shut, opened = activation.kappa(z).tolist()
    assert -float("inf") < shut <= -998
    assert opened == 1


@by_activation
def test_zero(activation):
    z = torch.zeros(1, dtype=torch.float64)
    slope, selection, kappa = {
        "relu": (0, 0, 0),
        "relu2": (0, 0, 0),
        "mish": (0.6, 0.6, 1),
    }.get(activation.name, (0.5, 0.5, 1))
    assert activation.derivative(z).item() == pytest.approx(slope)
    assert activation.selection(z).item() == pytest.approx(selection)
    assert activation.kappa(z).item() == kappa


def test_hard_gates_have_constant_kappa_on_each_side():
    z = torch.tensor([-80.0, -1e-30, 1e-30, 80.0])
    assert get("relu").kappa(z).tolist() == [0, 0, 1, 1]
    assert get("relu2").kappa(z).tolist() == [0, 0, 2, 2]


def test_the_papers_epsilon_has_poles_and_the_closed_form_none():
    """φ(z) = −ε twice for SiLU: next to zero and in the tail. The closed form is −15.6 and 1 there."""
    near_zero = torch.linspace(-2.1e-6, -1.9e-6, 2001, dtype=torch.float64)
    tail = torch.linspace(-16.7, -16.5, 2001, dtype=torch.float64)
    silu = get("silu")
    for z, truth in ((near_zero, 1.0), (tail, -15.6)):
        literal = silu.kappa(z, epsilon=1e-6)
        assert literal.max() > 1e3
        assert literal.min() < -1e3
        assert (silu.kappa(z) - truth).abs().max() < 0.2
    z = torch.linspace(0.5, 5, 50, dtype=torch.float64)
    torch.testing.assert_close(silu.kappa(z, epsilon=1e-6), silu.kappa(z), rtol=1e-5, atol=0)
    torch.testing.assert_close(silu.chi(z, epsilon=1e-6), 1 + silu.kappa(z, epsilon=1e-6))


# Characteristic points


@pytest.mark.parametrize("name", SMOOTH)
@pytest.mark.parametrize("made", [get, lambda name: get(FUNCTIONAL[name])], ids=["closed form", "autograd"])
def test_characteristic_points_table(name, made):
    assert made(name).characteristic_points == pytest.approx(POINTS[name], abs=1e-9)


@pytest.mark.parametrize("name", SMOOTH)
def test_characteristic_points_are_a_zero_and_a_maximum_of_kappa(name):
    activation = get(name)
    lower, upper = activation.characteristic_points
    at = torch.tensor([lower, upper], dtype=torch.float64)
    kappa = activation.kappa(at)
    assert abs(kappa[0]) < 1e-14
    assert activation.derivative(at)[0].abs() < 1e-15
    assert (activation.kappa(at[1] + torch.tensor([-1e-3, 1e-3])) < kappa[1]).all()
    between = torch.linspace(lower, upper, 1001, dtype=torch.float64)
    assert (activation.kappa(between).diff() > 0).all()


def test_silus_points_are_the_appendix_equation():
    lower, upper = get("silu").characteristic_points
    assert upper * torch.sigmoid(torch.tensor(upper, dtype=torch.float64)).item() == pytest.approx(1, abs=1e-15)
    assert lower == -upper
    assert f"{upper:.5f}" == "1.27846"


@pytest.mark.parametrize(
    "phi",
    [
        functional.relu,
        functional.leaky_relu,
        functional.softplus,
        functional.elu,
        functional.hardswish,
        functional.hardsigmoid,
        torch.tanh,
        torch.abs,
        torch.ones_like,
        lambda z: (z > 0).to(z.dtype),
        lambda z: torch.where(z > 0, z, z * torch.exp(z)),
    ],
    ids=lambda phi: phi.__name__,
)
def test_functions_without_both_points_have_none(phi):
    """The last has a zero at −1 but a constant κ for z > 0: rounding noise must not pass for an extremum."""
    assert get(phi).characteristic_points is None


@pytest.mark.parametrize("name", ["relu", "relu2"])
def test_hard_gates_have_no_points(name):
    assert get(name).characteristic_points is None


def test_a_root_on_a_grid_point_is_found():
    """φ′ of z·eᶻ is exactly zero at −1, one of the points scanned."""
    phi = get(lambda z: torch.where(z > 0, functional.silu(z), z * torch.exp(z)))
    assert phi.characteristic_points == pytest.approx((-1.0, POINTS["silu"][1]), abs=1e-9)


def test_of_several_roots_the_nearest_to_zero_counts():
    wavy = get(lambda z: z * (2 + torch.sin(z)))
    lower, upper = wavy.characteristic_points
    assert (wavy.derivative(line(-20, 0)).sign().diff() != 0).sum() > 2
    assert (wavy.derivative(line(lower, 0)[1:]) > 0).all()
    assert (wavy.kappa(line(0, upper)).diff() > 0).all()


def test_points_do_not_depend_on_the_callers_context():
    def fresh():
        return get(lambda z: z * torch.sigmoid(z))

    for context in (torch.no_grad(), torch.inference_mode(), torch.device("meta")):
        with context:
            assert fresh().characteristic_points == pytest.approx(POINTS["silu"], abs=1e-9)


# Any callable


@pytest.mark.parametrize("name", FUNCTIONAL)
def test_autograd_agrees_with_the_closed_form(name):
    z = line(-4, 20, 2401)
    custom, known = get(FUNCTIONAL[name]), get(name)
    for what in ("phi", "derivative", "selection", "kappa", "chi"):
        torch.testing.assert_close(getattr(custom, what)(z), getattr(known, what)(z), rtol=1e-9, atol=1e-9, msg=what)


def test_autograd_backed_results_carry_no_graph_without_grad_mode():
    custom = get(lambda z: z * torch.sigmoid(z))
    z = torch.tensor([-1.0, 0.0, 2.0], dtype=torch.float64, requires_grad=True)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            for given_z in (z, z * 1):
                slope = custom.derivative(given_z)
                assert not slope.requires_grad
                torch.testing.assert_close(slope, get("silu").derivative(z.detach()))
    assert not custom.derivative(z.detach()).requires_grad
    assert custom.derivative(torch.ones(3).bfloat16()).dtype == torch.bfloat16


def test_kappa_of_a_callable_at_its_own_zeros():
    z = torch.tensor([-1.0, 0.0], dtype=torch.float64)
    assert get(functional.relu).kappa(z).tolist() == [0, 0]
    assert get(functional.leaky_relu).kappa(z).tolist() == [1, 1]
    assert get(functional.softplus).kappa(z)[1] == 0


def test_get():
    assert get("swish") is get("silu")
    assert get("gelu_new") is get("gelu_pytorch_tanh") is get("gelu_fast") is get("gelu_tanh")
    assert get("relu_squared") is get("relu2")
    assert get(get("mish")) is get("mish")
    assert get(torch.nn.SiLU()).name == "SiLU"
    assert [a.name for a in KNOWN] == list(FUNCTIONAL)
    assert {a.name for a in KNOWN if a.degenerate_in_paper} == {
        "gelu",
        "gelu_tanh",
        "quick_gelu",
        "relu",
        "relu2",
    }


def test_unknown_name():
    with pytest.raises(NALoRAError, match=r"one of gelu, .*silu.*did you mean silu") as error:
        get("sillu")
    assert error.value.found == "'sillu'"
    with pytest.raises(NALoRAError, match="pass the elementwise function"):
        get("softmax")


# Clamped, and recognised


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@by_activation
def test_clamped(activation, dtype):
    z = line(-20, 20, 4001, dtype)
    cut, below = clamped(activation, 7.0), z <= 7
    assert cut.name == f"{activation.name}≤7"
    assert cut.degenerate_in_paper == activation.degenerate_in_paper
    torch.testing.assert_close(cut.phi(z), activation.phi(z.clamp(max=7)))
    torch.testing.assert_close(cut.selection(z) * z, cut.phi(z), rtol=1e-5, atol=1e-5)
    for what in ("derivative", "selection", "kappa"):
        torch.testing.assert_close(getattr(cut, what)(z)[below], getattr(activation, what)(z)[below])
    assert not cut.derivative(z)[~below].any()
    assert not cut.kappa(z)[~below].any()
    leaf = z.clone().requires_grad_()
    (slope,) = torch.autograd.grad(cut.phi(leaf).sum(), leaf)
    torch.testing.assert_close(cut.derivative(z), slope, rtol=1e-5, atol=1e-5)


def test_clamped_points_are_the_inner_ones_while_they_lie_below():
    silu = get("silu")
    assert clamped(silu, 7).characteristic_points == pytest.approx(silu.characteristic_points, abs=1e-12)
    assert clamped(silu, 1.3).characteristic_points == pytest.approx(silu.characteristic_points, abs=1e-12)
    assert clamped(silu, 1.2).characteristic_points is None
    with pytest.raises(NALoRAError, match="upper > 0"):
        clamped(silu, -1)


@pytest.mark.parametrize("name", FUNCTIONAL)
@pytest.mark.parametrize("through", [torch.float64, torch.float32])
def test_identify_knows_the_seven(name, through):
    assert identify(lambda z: FUNCTIONAL[name](z.to(through))) is get(name)


@pytest.mark.parametrize(
    ("written", "name"),
    [
        (torch.nn.SiLU(), "silu"),
        (lambda z: z / (1 + torch.exp(-z)), "silu"),
        (lambda z: z * 0.5 * (1 + torch.erf(z / 2**0.5)), "gelu"),
        (lambda z: 0.5 * z * (1 + torch.tanh(0.7978845608 * z * (1 + 0.044715 * z * z))), "gelu_tanh"),
        (lambda z: z * torch.tanh(torch.log1p(torch.exp(z))), "mish"),
    ],
)
def test_identify_looks_at_values_not_at_names(written, name):
    assert identify(written) is get(name)


@pytest.mark.parametrize("name", FUNCTIONAL)
@pytest.mark.parametrize("limit", [1.5, 7.0, 60.0])
@pytest.mark.parametrize("through", [torch.float64, torch.float32])
def test_identify_finds_a_clamp(name, limit, through):
    found = identify(lambda z: FUNCTIONAL[name](z.to(through).clamp(max=limit)))
    assert found.name == f"{name}≤{limit:g}"
    z = torch.tensor([limit - 0.01, limit + 0.01], dtype=torch.float64)
    assert found.derivative(z)[0] > 0.5
    assert found.derivative(z)[1] == 0


def test_identify_knows_gpt_oss():
    def gate(z):
        z = z.clamp(min=None, max=7.0)
        return z * torch.sigmoid(z * 1.702)

    found = identify(gate)
    assert found.name == "quick_gelu≤7"
    assert found.characteristic_points == pytest.approx(POINTS["quick_gelu"], abs=1e-9)


def test_identify_falls_back_to_autograd():
    def steep(z):
        return z * torch.sigmoid(3 * z)

    found = identify(steep)
    assert found.name == "steep"
    assert not found.degenerate_in_paper
    assert found.characteristic_points == pytest.approx([p / 3 for p in POINTS["silu"]], abs=1e-9)
    z = line(-5, 5, 101)
    torch.testing.assert_close(found.derivative(z), get("silu").derivative(3 * z))
    assert identify(functional.hardtanh).name == "hardtanh"
    assert identify(functional.leaky_relu).name == "leaky_relu"
