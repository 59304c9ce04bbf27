"""The sufficient statistics of one FFN block: all that is ever kept of z."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# The narrowest block of channels that a kernel's program owns.
_CHANNELS_PER_SLOT = 64


class Sums(NamedTuple):
    """Running sums over the tokens of one optimizer step, in parts that are added up when the step is decided.

    On a GPU every program of a kernel adds to a part of its own: no second pass, no atomics, the same order of
    additions every time. Elsewhere there is one part.

    Args:
        sensitivity: Σ|φ′(z)| (or Σ|φ′(z)|·|u|) per channel, float32, or float64 for a float64 model.
            Shape [parts, width]. One non-finite z makes a channel NaN, which is how a poisoned step is recognised.
        outside: how many z were suppressive and how many positive. int64, exact at any count, shape [parts, slots, 2].
        tokens: how many tokens were counted. int64, shape [parts].
    """

    sensitivity: Tensor
    outside: Tensor
    tokens: Tensor

    @classmethod
    def zeros(cls, blocks: int, width: int, dtype: torch.dtype, device: torch.device) -> Sums:
        """The sums of several blocks, stacked along a first dimension."""
        slots = -(-width // _CHANNELS_PER_SLOT)
        # About 2,048 programs fill a large GPU: many parts for a narrow block, few for a wide one.
        parts = min(128, max(8, 4096 // slots)) if device.type == "cuda" else 1
        return cls(
            torch.zeros(blocks, parts, width, dtype=dtype, device=device),
            torch.zeros(blocks, parts, slots, 2, dtype=torch.int64, device=device),
            torch.zeros(blocks, parts, dtype=torch.int64, device=device),
        )

    def of_block(self, index: int) -> Sums:
        """One block's share of stacked sums."""
        return Sums(*(each[index] for each in self))

    def totals(self) -> tuple[Tensor, Tensor, Tensor]:
        """Σ per channel, (suppressive, responsive, positive) counts, and tokens, for each of the stacked blocks."""
        sensitivity, tokens = self.sensitivity.sum(-2), self.tokens.sum(-1)
        below, above = self.outside.sum((-3, -2)).unbind(-1)
        responsive = tokens * sensitivity.shape[-1] - below - above
        return sensitivity, torch.stack([below, responsive, above], dim=-1), tokens

    def clear(self) -> None:
        """Start anew."""
        for each in self:
            each.zero_()
