"""Frozen weights as fused layers use them: products with an input, and with the gradients of outputs.

A weight may be stored in the dtype of computation, in 4 bits, or in FP8 (`nalora.kernels.fused.fp8_linear`). The fused
functions do not distinguish between them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Rows:
    """The input of one or more products, [tokens, in]; what the weights derive from it is computed once."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self._derived: dict[Callable[[Tensor], object], object] = {}

    def derive(self, function: Callable[[Tensor], T]) -> T:
        """Return function(tensor); later calls with the same function return the same object."""
        if function not in self._derived:
            self._derived[function] = function(self.tensor)
        return self._derived[function]


class FrozenWeight(ABC):
    """A weight W of shape [out, in] that is not trained."""

    @abstractmethod
    def product(self, rows: Rows) -> Tensor:
        """Return x Wᵀ."""

    @abstractmethod
    def adapted_product(self, rows: Rows, low: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x Wᵀ + low Bᵀ + bias, where low is x (s A)ᵀ."""


class DenseWeight(FrozenWeight):
    """A weight that can be read in the dtype of computation: stored like that, or dequantised for each product."""

    def __init__(self, read: Callable[[torch.dtype], Tensor]) -> None:
        self.read = read

    def product(self, rows: Rows) -> Tensor:
        """Return x Wᵀ."""
        return rows.tensor @ self.read(rows.tensor.dtype).T

    def adapted_product(self, rows: Rows, low: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute the low-rank term first: the large product then adds to it while it computes."""
        y = low @ b.T if bias is None else torch.addmm(bias.to(low.dtype), low, b.T)
        return y.addmm_(rows.tensor, self.read(low.dtype).T)


class SummedWeight(FrozenWeight):
    """A weight whose products cannot add to an existing tensor; gradients of several are one product."""

    @classmethod
    @abstractmethod
    def summed_gradient(cls, weights: Sequence[FrozenWeight], grads: Sequence[Tensor]) -> Tensor:
        """Return Σ dyᵢ Wᵢ for weights of this class."""

    def adapted_product(self, rows: Rows, low: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        """Add the low-rank term to the product."""
        y = self.product(rows).addmm_(low, b.T)
        return y if bias is None else y.add_(bias)


def input_gradient(
    weights: Sequence[FrozenWeight],
    grads: Sequence[Tensor | None],
    through: Tensor | None = None,
    a: Tensor | None = None,
) -> Tensor:
    """Return dx = Σ dyᵢ Wᵢ + through · a.

    Args:
        weights: of the layers that share the input.
        grads: of their outputs, None for an output that was not used.
        through: the gradients of the projected input, [tokens, Σ rank], if the low-rank term is to be added.
        a: the stacked factors s·A, [Σ rank, in].
    """
    used = [(weight, dy) for weight, dy in zip(weights, grads, strict=True) if dy is not None]
    dense = [(weight, dy) for weight, dy in used if isinstance(weight, DenseWeight)]
    summed = [(weight, dy) for weight, dy in used if isinstance(weight, SummedWeight)]
    dx = None
    if summed:
        of_kind, dys = zip(*summed, strict=True)
        dx = of_kind[0].summed_gradient(of_kind, dys)
    if through is not None and a is not None:
        dx = through @ a if dx is None else dx.addmm_(through, a)
    for weight, dy in dense:
        w = weight.read(dy.dtype)
        dx = dy @ w if dx is None else dx.addmm_(dy, w)
        del w  # a dequantised copy, before the next one is made
    assert dx is not None
    return dx
