"""Statistics that an operator inside a compiled graph adds to: which, is looked up at every call.

A graph consists of tensors and constants. The number of an observer as a constant would be another graph for every
layer, so it reaches the operator as the value of a tensor on the host. Whether a pass counts is decided by the observer
while the operator runs, by the same rules as in eager layers.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Protocol

import torch
from torch import Tensor

from nalora.kernels.statistics import Sums

_keys = itertools.count()
_collectors: weakref.WeakValueDictionary[int, Collector] = weakref.WeakValueDictionary()


class Collector(Protocol):
    """Decides for one FFN which passes count.

    Attributes:
        thresholds: between the regimes of the activation.
        with_up: whether |φ′| is multiplied by |u|.
    """

    thresholds: tuple[float, float]
    with_up: bool

    def begin_pass(self, shape: torch.Size, device: torch.device) -> tuple[Sums | None, Tensor | None]:
        """Return the sums that a pass adds to, None if it does not count, and the mask of its tokens."""


def key_of(collector: Collector) -> Tensor:
    """Return the tensor by which an operator finds the collector, as long as it is alive."""
    number = next(_keys)
    _collectors[number] = collector
    return torch.tensor([number])


def collector_of(key: Tensor | None) -> Collector | None:
    """Return the collector of a key."""
    return None if key is None else _collectors.get(int(key.item()))
