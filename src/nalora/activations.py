"""Activations with their derivative, selection weight, κ, χ and characteristic points.

Seven activations are in closed form, accurate for every z in every float dtype. Autograd computes the same for any
other elementwise function (`get`); `identify` recognises a function as one of the seven by its values.
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
        unclamped: for a `clamped` activation, the activation without the clamp.
        upper: for a `clamped` activation, the largest z.
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
        """Return κ(z); with ε > 0 in the paper's literal form (eq:kappa_def_main), which has poles."""
        return equations.kappa(z, self.phi(z), self.derivative(z), epsilon) if epsilon else self.exact_kappa(z)

    def chi(self, z: Tensor, epsilon: float = 0.0) -> Tensor:
        """Return χ(z) = 1 + κ(z), the effective homogeneity profile (eq:kappa_def_main)."""
        return equations.chi(self.kappa(z, epsilon))

    @cached_property
    def characteristic_points(self) -> CharacteristicPoints | None:
        """The zero of κ nearest to 0 among z < 0 and its first stationary point among z > 0.

        Both are sign changes within |z| ≤ 20: of φ′ for the zero (κ = 0 ⇔ φ′ = 0, φ ≠ 0), of κ′ for the stationary
        point. None where either does not exist: hard gates (ReLU), monotone functions (LeakyReLU, softplus, tanh), or
        a κ with a jump in place of a maximum (hardswish).
        """
        lower = _first_sign_change(self.derivative, -20.0)
        if lower is None:
            return None
        upper = _first_sign_change(partial(_slope, self.exact_kappa), 20.0)
        return None if upper is None else CharacteristicPoints(lower, upper)


def get(activation: str | Activation | Elementwise) -> Activation:
    """Return the activation of that name, or an activation with derivatives by autograd for a callable.

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
    """Return φ(min(z, upper)), as in gpt-oss, which clamps its gate at 7.

    Raises:
        NALoRAError: `upper` is not positive; φ(min(z, upper)) would not be 0 at z = 0, so it is not self-gated.
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
    """Return the activation with the values of `phi`: one of KNOWN, one of them clamped, or else `get(phi)`.

    The tolerance 1e-5 allows for a φ computed in float32; exact and tanh GELU differ by 4.7e-4.
    """
    dense = (n / 40 for n in range(-480, 481))
    z = torch.tensor([*dense, -50, -20, 20, 50, 100], dtype=torch.float64, device="cpu")
    values = phi(z).to(z)

    def matches(candidate: Activation) -> bool:
        return torch.allclose(values, candidate.phi(z), rtol=1e-5, atol=1e-5)

    def cut(known: Activation) -> Activation:
        # Every known φ increases for z > 1, so phi's last value determines where it may be clamped.
        return clamped(known, _bisect(lambda x: known.phi(x) - values[-1], 1.0, 100.0))

    return next(filter(matches, chain(KNOWN, map(cut, KNOWN))), None) or get(phi)


def _wide(function: Elementwise) -> Elementwise:
    """Return `function` computed in float32 for 16-bit dtypes, whose arithmetic overflows at z³."""

    def apply(z: Tensor) -> Tensor:
        if z.dtype in (torch.bfloat16, torch.float16):
            return function(z.float()).to(z.dtype)
        return function(z)

    return apply


def _activation(name: str, phi: Elementwise, *quantities: Elementwise, degenerate: bool = False) -> Activation:
    """Return an activation from φ and φ′, s and κ, which are computed in float32 for 16-bit dtypes."""
    derivative, selection, kappa = map(_wide, quantities)
    return Activation(name, phi, derivative, selection, kappa, degenerate)


def _slope(function: Elementwise, z: Tensor) -> Tensor:
    """Return function′(z) by autograd, under no_grad too; it is differentiable if gradients are on and z needs one."""
    again = torch.is_grad_enabled() and z.requires_grad
    with torch.inference_mode(False), torch.enable_grad():
        x = z if again else z.detach().clone().requires_grad_()
        y = function(x)
        if not y.requires_grad:  # a step function, such as ReLU's κ
            return torch.zeros_like(z)
        return torch.autograd.grad(y.sum(), x, create_graph=again)[0]


def _by_autograd(phi: Elementwise) -> Activation:
    """Return an activation from φ alone. κ is as accurate as φ, so it is wrong where φ underflows."""
    derivative = _wide(partial(_slope, phi))

    def kappa(z: Tensor) -> Tensor:
        value, slope = phi(z), derivative(z)
        # 0/0: the limit is 1 where φ crosses zero at z = 0; where φ is flat the convention is 0.
        hole = (value == 0) & (z * slope == 0)
        return torch.where(hole, (slope != 0).to(z.dtype), equations.kappa(z, value, slope))

    name = getattr(phi, "__name__", type(phi).__name__)
    return _activation(name, phi, derivative, lambda z: equations.selection_weight(z, phi(z), derivative(z)), kappa)


def _first_sign_change(function: Elementwise, end: float) -> float | None:
    """Return the root nearest to 0 between 0 and `end` at which the sign changes, None without one."""
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
    """Return where `function` changes sign between `start` and `end`, to the last bit; `end` if it does not."""

    def negative(z: float) -> bool:
        return bool(function(torch.tensor(z, dtype=torch.float64, device="cpu")) < 0)

    sign = negative(start)
    while (middle := (start + end) / 2) not in (start, end):
        start, end = (middle, end) if negative(middle) == sign else (start, middle)
    return middle


def _sigmoid_gated(
    name: str, phi: Elementwise, exponent: Callable[[Tensor], tuple[Tensor, Tensor]], degenerate: bool
) -> Activation:
    """Return φ(z) = z·σ(g(z)), with φ′ = σ(1 + zg′(1 − σ)) and κ = 1 + zg′·σ(−g); `exponent` returns g and zg′."""

    def derivative(z: Tensor) -> Tensor:
        g, zg = exponent(z)
        s = torch.sigmoid(g)
        return torch.addcmul(s, zg * s, 1 - s)

    def kappa(z: Tensor) -> Tensor:
        g, zg = exponent(z)
        return 1 + zg * torch.sigmoid(-g)

    return _activation(name, phi, derivative, lambda z: torch.sigmoid(exponent(z)[0]), kappa, degenerate=degenerate)


def _quick_exponent(z: Tensor) -> tuple[Tensor, Tensor]:
    g = 1.702 * z
    return g, g


def _tanh_exponent(z: Tensor) -> tuple[Tensor, Tensor]:
    # ½(1 + tanh y) = σ(2y) with y = √(2/π)(z + 0.044715z³)
    linear = 2 * math.sqrt(2 / math.pi) * z
    cubic = 0.044715 * z.square() * linear
    return linear + cubic, linear + 3 * cubic


_gelu_tanh = partial(gelu, approximate="tanh")


def _gelu_selection(z: Tensor) -> Tensor:
    # torch.special.ndtr computes ½(1 + erf), which in float32 is only rounding error below z = −5.
    return torch.erfc(-z * math.sqrt(0.5)) / 2


def _gelu_derivative(z: Tensor) -> Tensor:
    density = torch.exp(-z.square() / 2) / math.sqrt(2 * math.pi)
    return torch.addcmul(_gelu_selection(z), z, density)


def _gelu_kappa(z: Tensor) -> Tensor:
    # 1 + z·density/Φ; erfcx is Φ without its factor exp(−z²/2), so the ratio is accurate in the tail.
    scaled: Tensor = torch.special.erfcx(-z * math.sqrt(0.5))
    return 1 + math.sqrt(2 / math.pi) * z / scaled


def _mish_selection(z: Tensor) -> Tensor:
    return torch.tanh(softplus(z))


def _mish_derivative(z: Tensor) -> Tensor:
    s = _mish_selection(z)
    return torch.addcmul(s, z * torch.sigmoid(z), 1 - s.square())


def _mish_kappa(z: Tensor) -> Tensor:
    t = torch.exp(z.clamp(max=25))  # t³ fits float32, and beyond 25 the fraction is below 1e-19
    return 1 + 4 * z * (t + 1) / ((t.square() + 2 * t + 2) * (t + 2))


def _step(z: Tensor) -> Tensor:
    return (z > 0).to(z.dtype)


KNOWN: tuple[Activation, ...] = (
    _sigmoid_gated("silu", silu, lambda z: (z, z), degenerate=False),
    _activation("gelu", gelu, _gelu_derivative, _gelu_selection, _gelu_kappa, degenerate=True),
    _sigmoid_gated("gelu_tanh", _gelu_tanh, _tanh_exponent, degenerate=True),
    _sigmoid_gated("quick_gelu", lambda z: z * torch.sigmoid(1.702 * z), _quick_exponent, degenerate=True),
    Activation("relu", relu, _step, _step, _step, True),
    Activation("relu2", lambda z: relu(z).square(), lambda z: 2 * relu(z), relu, lambda z: 2 * _step(z), True),
    _activation("mish", mish, _mish_derivative, _mish_selection, _mish_kappa),
)

_ALIASES = {"swish": "silu", "relu_squared": "relu2"}
_ALIASES |= dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), "gelu_tanh")
_BY_NAME = {activation.name: activation for activation in KNOWN}
_BY_NAME |= {alias: _BY_NAME[name] for alias, name in _ALIASES.items()}
