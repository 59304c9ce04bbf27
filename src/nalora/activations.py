"""What nalora knows of an activation: φ, φ′, its selection weight, κ, χ and its characteristic points.

Seven activations come in closed form, each sound over the whole line in every float dtype. Any other
elementwise function is served by autograd (`get`), or recognised by its values as one of the seven
(`identify`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import gelu, mish, relu, silu, softplus

from nalora import equations
from nalora.equations import Elementwise
from nalora.errors import require, unknown_name


class CharacteristicPoints(NamedTuple):
    """The two z that bound the responsive regime (app:local_homogeneity)."""

    lower: float
    upper: float


@dataclass(frozen=True)
class Activation:
    """An elementwise φ with the quantities of Section 3; every function maps z to a tensor of its shape.

    Attributes:
        phi: φ(z).
        derivative: φ′(z).
        selection: s(z) = φ(z)/z (eq:selection_weight_def).
        exact_kappa: κ(z) without ε; 0 where φ is flat at zero, as ReLU is for z ≤ 0.
        degenerate_in_paper: whether the paper declares its regimes degenerate (the GELU and ReLU families).
        unclamped: the activation inside a `clamped` one.
        upper: where that one is clamped.
    """

    name: str
    phi: Elementwise = field(repr=False)
    derivative: Elementwise = field(repr=False)
    selection: Elementwise = field(repr=False)
    exact_kappa: Elementwise = field(repr=False)
    degenerate_in_paper: bool = False
    unclamped: Activation | None = field(default=None, repr=False)
    upper: float = math.inf

    def kappa(self, z: Tensor, epsilon: float = 0.0) -> Tensor:
        """κ(z); with ε > 0 in the paper's literal form (eq:kappa_def_main), poles and all."""
        if epsilon:
            return equations.kappa(z, self.phi(z), self.derivative(z), epsilon)
        return self.exact_kappa(z)

    def chi(self, z: Tensor, epsilon: float = 0.0) -> Tensor:
        """χ(z) = 1 + κ(z), the effective homogeneity profile (eq:kappa_def_main)."""
        return equations.chi(self.kappa(z, epsilon))

    @cached_property
    def characteristic_points(self) -> CharacteristicPoints | None:
        """κ's zero nearest to 0 among z < 0 and its first stationary point among z > 0.

        Both are sought where a sign changes within |z| ≤ 20: of φ′ for the zero (κ = 0 ⇔ φ′ = 0, φ ≠ 0), of
        κ′ for the stationary point. None where either is missing: hard gates (ReLU), monotone functions
        (LeakyReLU, softplus, tanh), or a κ that jumps instead of turning (hardswish).
        """
        lower = _first_sign_change(self.derivative, -20.0)
        if lower is None:
            return None
        upper = _first_sign_change(partial(_slope, self.exact_kappa), 20.0)
        return None if upper is None else CharacteristicPoints(lower, upper)


def get(activation: str | Activation | Elementwise) -> Activation:
    """The activation of that name, or one whose derivatives autograd takes from a callable.

    Raises:
        NALoRAError: no activation has that name.
    """
    if isinstance(activation, Activation):
        return activation
    if not isinstance(activation, str):
        return _by_autograd(activation)
    if activation not in _BY_NAME:
        raise unknown_name(
            "activation", repr(activation), activation, sorted(_BY_NAME), "pass the elementwise function itself"
        )
    return _BY_NAME[activation]


def clamped(activation: Activation, upper: float) -> Activation:
    """φ(min(z, upper)): gpt-oss clamps its gate so, at 7.

    Raises:
        NALoRAError: `upper` is not positive; φ(min(z, upper)) would not vanish at 0, so not gate itself.
    """
    require(upper > 0, f"clamped({activation.name}), upper", upper, "upper > 0", "clamp above 0")
    return Activation(
        f"{activation.name}≤{upper:g}",
        phi=lambda z: activation.phi(z.clamp(max=upper)),
        derivative=lambda z: activation.derivative(z).masked_fill(z > upper, 0),
        selection=lambda z: activation.selection(z.clamp(max=upper)) * (upper / z.clamp(min=upper)),
        exact_kappa=lambda z: activation.exact_kappa(z).masked_fill(z > upper, 0),
        degenerate_in_paper=activation.degenerate_in_paper,
        unclamped=activation,
        upper=upper,
    )


@torch.no_grad()
def identify(phi: Elementwise) -> Activation:
    """What `phi` computes, known by its values: one of KNOWN, one of them clamped, or else `get(phi)`.

    1e-5 forgives a φ computed in float32 and still parts exact from tanh GELU, 4.7e-4 away.
    """
    dense = (n / 40 for n in range(-480, 481))
    z = torch.tensor([*dense, -50, -20, 20, 50, 100], dtype=torch.float64, device="cpu")
    values = phi(z).to(z)

    def matches(candidate: Activation) -> bool:
        return torch.allclose(values, candidate.phi(z), rtol=1e-5, atol=1e-5)

    def cut(known: Activation) -> Activation:
        # Every known φ rises for z > 1, so phi's last value tells where a clamp would have cut it.
        return clamped(known, _bisect(lambda x: known.phi(x) - values[-1], 1.0, 100.0))

    return next(filter(matches, chain(KNOWN, map(cut, KNOWN))), None) or get(phi)


def _wide(function: Elementwise) -> Elementwise:
    """`function`, computed in float32 for the half types, whose own arithmetic overflows at z³."""

    def apply(z: Tensor) -> Tensor:
        if z.dtype in (torch.bfloat16, torch.float16):
            return function(z.float()).to(z.dtype)
        return function(z)

    return apply


def _slope(function: Elementwise, z: Tensor) -> Tensor:
    """function′(z) by autograd, under no_grad too; itself differentiable where grad mode and z ask for it."""
    again = torch.is_grad_enabled() and z.requires_grad
    with torch.inference_mode(False), torch.enable_grad():
        x = z if again else z.detach().clone().requires_grad_()
        y = function(x)
        if not y.requires_grad:  # a step function, such as ReLU's κ
            return torch.zeros_like(z)
        return torch.autograd.grad(y.sum(), x, create_graph=again)[0]


def _by_autograd(phi: Elementwise) -> Activation:
    """All from φ alone. Its κ is as good as φ's digits, so wrong in a tail where φ underflows."""

    @_wide
    def derivative(z: Tensor) -> Tensor:
        return _slope(phi, z)

    @_wide
    def selection(z: Tensor) -> Tensor:
        return equations.selection_weight(z, phi(z), derivative(z))

    @_wide
    def kappa(z: Tensor) -> Tensor:
        value, slope = phi(z), derivative(z)
        # 0/0: the limit is 1 where φ crosses zero at z = 0; where φ is flat the convention is 0.
        hole = (value == 0) & (z * slope == 0)
        return torch.where(hole, (slope != 0).to(z.dtype), equations.kappa(z, value, slope))

    return Activation(getattr(phi, "__name__", type(phi).__name__), phi, derivative, selection, kappa)


def _first_sign_change(function: Elementwise, end: float) -> float | None:
    """The root of a sign change nearest to 0 on the way from 0 to `end`."""
    grid = torch.linspace(0, end, 2001, dtype=torch.float64, device="cpu")[1:]
    values = function(grid)
    firm = values.abs() > 1e-10  # a constant κ has a κ′ of rounding noise, about 1e-14 at the first points
    grid, values = grid[firm], values[firm]
    changes = (values[1:] * values[:-1] < 0).nonzero()
    if not len(changes):
        return None
    first = int(changes[0])
    return _bisect(function, float(grid[first]), float(grid[first + 1]))


def _bisect(function: Elementwise, start: float, end: float) -> float:
    """Where `function` changes sign between `start` and `end`, to the last bit; `end` where it does not."""

    def negative(z: float) -> bool:
        return bool(function(torch.tensor(z, dtype=torch.float64, device="cpu")) < 0)

    sign = negative(start)
    while (middle := (start + end) / 2) not in (start, end):
        start, end = (middle, end) if negative(middle) == sign else (start, middle)
    return middle


def _sigmoid_gated(
    name: str, phi: Elementwise, exponent: Callable[[Tensor], tuple[Tensor, Tensor]], degenerate: bool
) -> Activation:
    """φ(z) = z·σ(g(z)), so φ′ = σ(1 + zg′(1 − σ)) and κ = 1 + zg′·σ(−g); `exponent` gives g and zg′."""

    @_wide
    def derivative(z: Tensor) -> Tensor:
        g, zg = exponent(z)
        s = torch.sigmoid(g)
        return torch.addcmul(s, zg * s, 1 - s)

    @_wide
    def selection(z: Tensor) -> Tensor:
        return torch.sigmoid(exponent(z)[0])

    @_wide
    def kappa(z: Tensor) -> Tensor:
        g, zg = exponent(z)
        return 1 + zg * torch.sigmoid(-g)

    return Activation(name, phi, derivative, selection, kappa, degenerate)


def _quick_exponent(z: Tensor) -> tuple[Tensor, Tensor]:
    g = 1.702 * z
    return g, g


def _tanh_exponent(z: Tensor) -> tuple[Tensor, Tensor]:
    # ½(1 + tanh y) = σ(2y) with y = √(2/π)(z + 0.044715z³)
    linear = 2 * math.sqrt(2 / math.pi) * z
    cubic = 0.044715 * z.square() * linear
    return linear + cubic, linear + 3 * cubic


_gelu_tanh = partial(gelu, approximate="tanh")


@_wide
def _gelu_selection(z: Tensor) -> Tensor:
    # torch.special.ndtr is ½(1 + erf), in float32 all rounding error below z = −5.
    return torch.erfc(-z * math.sqrt(0.5)) / 2


@_wide
def _gelu_derivative(z: Tensor) -> Tensor:
    density = torch.exp(-z.square() / 2) / math.sqrt(2 * math.pi)
    return torch.addcmul(_gelu_selection(z), z, density)


@_wide
def _gelu_kappa(z: Tensor) -> Tensor:
    # 1 + z·density/Φ; erfcx is Φ without its factor exp(−z²/2), so the ratio loses no digits in the tail.
    scaled: Tensor = torch.special.erfcx(-z * math.sqrt(0.5))
    return 1 + math.sqrt(2 / math.pi) * z / scaled


@_wide
def _mish_selection(z: Tensor) -> Tensor:
    return torch.tanh(softplus(z))


@_wide
def _mish_derivative(z: Tensor) -> Tensor:
    s = _mish_selection(z)
    return torch.addcmul(s, z * torch.sigmoid(z), 1 - s.square())


@_wide
def _mish_kappa(z: Tensor) -> Tensor:
    t = torch.exp(z.clamp(max=25))  # t³ fits float32, and beyond 25 the fraction is below 1e-19
    return 1 + 4 * z * (t + 1) / ((t.square() + 2 * t + 2) * (t + 2))


def _step(z: Tensor) -> Tensor:
    return (z > 0).to(z.dtype)


KNOWN: tuple[Activation, ...] = (
    _sigmoid_gated("silu", silu, lambda z: (z, z), degenerate=False),
    Activation("gelu", gelu, _gelu_derivative, _gelu_selection, _gelu_kappa, True),
    _sigmoid_gated("gelu_tanh", _gelu_tanh, _tanh_exponent, degenerate=True),
    _sigmoid_gated("quick_gelu", lambda z: z * torch.sigmoid(1.702 * z), _quick_exponent, degenerate=True),
    Activation("relu", relu, _step, _step, _step, True),
    Activation("relu2", lambda z: relu(z).square(), lambda z: 2 * relu(z), relu, lambda z: 2 * _step(z), True),
    Activation("mish", mish, _mish_derivative, _mish_selection, _mish_kappa, False),
)

_ALIASES = {"swish": "silu", "relu_squared": "relu2"}
_ALIASES |= dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), "gelu_tanh")
_BY_NAME = {activation.name: activation for activation in KNOWN}
_BY_NAME |= {alias: _BY_NAME[name] for alias, name in _ALIASES.items()}
