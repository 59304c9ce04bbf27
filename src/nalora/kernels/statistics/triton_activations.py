"""φ and φ′ of every known activation inside Triton kernels, in float32 registers.

FAST computes σ with the hardware's approximate power and reciprocal (relative error 2⁻²², in the far tail too).
"""

from __future__ import annotations

import triton
import triton.language as tl

from nalora import activations
from nalora.activations import Activation

# The kernels identify activations by number; a clamp above `limit` (gpt-oss) is a separate argument.
NUMBERS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "quick_gelu": 3, "relu": 4, "relu2": 5, "mish": 6}


def number_and_limit(activation: Activation) -> tuple[int, float] | None:
    """Return an activation's number and clamp; None if no kernel computes it, also if it only has the name of one."""
    inner = activation.unclamped or activation
    known = inner.name in NUMBERS and activations.get(inner.name) == inner
    return (NUMBERS[inner.name], activation.upper) if known else None


@triton.jit
def _sigmoid(x, FAST: tl.constexpr):
    if FAST:
        return tl.inline_asm_elementwise(
            "{ .reg .f32 d; mul.f32 d, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 d, d;"  # 2^(−x·log₂e)
            "add.f32 d, d, 0f3F800000; rcp.approx.ftz.f32 $0, d; }",
            "=f,f", [x], tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    return tl.sigmoid(x)


@triton.jit
def phi_and_derivative(z, limit, NUMBER: tl.constexpr, LIMITED: tl.constexpr, FAST: tl.constexpr):
    """Return (φ(z), φ′(z)), of φ(min(z, limit)) if LIMITED; φ′ of a non-finite z is NaN."""
    x = tl.minimum(z, limit) if LIMITED else z
    if NUMBER == 0 or NUMBER == 2 or NUMBER == 3:
        # φ = x·σ(g): φ′ = σ + σ(1 − σ)·x·g′
        if NUMBER == 0:
            g = x
            xg = x
        elif NUMBER == 3:
            g = 1.702 * x
            xg = g
        else:
            linear = 1.5957691216057308 * x
            cubic = 0.044715 * x * x * linear
            g = linear + cubic
            xg = linear + 3 * cubic
        s = _sigmoid(g, FAST)
        phi = x * s
        derivative = tl.fma(s, tl.fma(-xg, s, xg), s)
    elif NUMBER == 1:
        s = 0.5 * (1 + tl.erf(x * 0.7071067811865476))
        phi = x * s
        derivative = s + x * (0.3989422804014327 * tl.exp(-0.5 * x * x))
    elif NUMBER == 4:
        phi = tl.maximum(x, 0.0)
        derivative = tl.where(x > 0, 1.0, 0.0) + (x - x)
    elif NUMBER == 5:
        positive = tl.maximum(x, 0.0)
        phi = positive * positive
        derivative = 2 * positive + (x - x)
    else:
        # tanh(softplus(x)) = (t² + 2t)/(t² + 2t + 2) with t = eˣ
        t = tl.exp(tl.minimum(x, 25.0))
        n = t * (t + 2)
        s = n / (n + 2)
        phi = x * s
        derivative = s + x * tl.sigmoid(x) * (1 - s * s)
    if LIMITED:
        derivative = tl.where(z > limit, 0.0, derivative) + (z - z)
    return phi, derivative
