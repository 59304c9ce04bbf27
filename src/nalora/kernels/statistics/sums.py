"""The sufficient statistics of an FFN block, and the input of the engines that compute them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# (lower, upper) bound of the responsive regime, both inclusive.
Bounds = tuple[float, float]
# The narrowest block of channels that one program of a kernel computes.
_CHANNELS_PER_SLOT = 64


class Sums(NamedTuple):
    """Running sums over the tokens of one optimizer step, in parts that are added up when the step is decided.

    On a GPU every program of a kernel adds to its own part, which needs no second pass and no atomics and fixes the
    order of additions. On other devices there is one part.

    Args:
        sensitivity: Σ|φ′(z)| (or Σ|φ′(z)|·|u|) per channel, float32, or float64 for a float64 model.
            Shape [parts, width]. One non-finite z makes its channel NaN, by which a bad step is detected.
        outside: the number of suppressive and of positive z. int64, exact at any count, shape [parts, slots, 2].
        tokens: the number of tokens. int64, shape [parts].
    """

    sensitivity: Tensor
    outside: Tensor
    tokens: Tensor

    @classmethod
    def zeros(cls, blocks: int, width: int, dtype: torch.dtype, device: torch.device, parts: int | None = None) -> Sums:
        """Return the sums of several blocks, stacked along a first dimension, in the best number of parts."""
        slots = -(-width // _CHANNELS_PER_SLOT)
        if parts is None:
            # About 2,048 programs fill a large GPU: many parts for a narrow block, few for a wide one.
            parts = min(128, max(8, 4096 // slots)) if device.type == "cuda" else 1
        return cls(
            torch.zeros(blocks, parts, width, dtype=dtype, device=device),
            torch.zeros(blocks, parts, slots, 2, dtype=torch.int64, device=device),
            torch.zeros(blocks, parts, dtype=torch.int64, device=device),
        )

    def of_block(self, index: int) -> Sums:
        """Return one block's view of stacked sums."""
        return Sums(*(tensor[index] for tensor in self))

    def totals(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return Σ per channel, (suppressive, responsive, positive) counts, and tokens of each stacked block."""
        sensitivity, tokens = self.sensitivity.sum(-2), self.tokens.sum(-1)
        below, above = self.outside.sum((-3, -2)).unbind(-1)
        responsive = tokens * sensitivity.shape[-1] - below - above
        return sensitivity, torch.stack([below, responsive, above], dim=-1), tokens

    def clear(self) -> None:
        """Set all sums to zero."""
        for tensor in self:
            tensor.zero_()


def flatten(z: Tensor, u: Tensor | None, mask: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return z and u with shape [tokens, width] and the mask with shape [tokens]."""
    u = None if u is None else u.reshape(-1, z.shape[-1])
    return z.reshape(-1, z.shape[-1]), u, None if mask is None else mask.reshape(-1)
