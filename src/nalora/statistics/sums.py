"""The sufficient statistics of one FFN block: all that is ever kept of z."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Sums(NamedTuple):
    """Running sums over the tokens of one optimizer step.

    Args:
        sensitivity: Σ|φ′(z)| (or Σ|φ′(z)|·|u|) per channel, float32, or float64 for a float64 model. Shape [width].
            One non-finite z makes all of it NaN, which is how a poisoned step is recognised on the device.
        regimes: how many z were suppressive, responsive, positive. int64, shape [3], exact at any count.
        tokens: how many tokens were counted. int64, shape [].
    """

    sensitivity: Tensor
    regimes: Tensor
    tokens: Tensor
