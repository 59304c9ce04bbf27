"""A frozen linear layer whose weight is stored in FP8, in place of the base layer below an adapter.

The layer works anywhere a linear layer does: PEFT's own forward, evaluation and generation call it, and fused layers
use its weight directly. Gradients flow to the input; the weight is not trainable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from nalora.kernels.fused import fp8
from nalora.kernels.fused.fp8 import Quantised, quantise_rows
from nalora.kernels.fused.frozen import FrozenWeight, Rows, SummedWeight
from nalora.kernels.fused.lora_linear import compute_dtype


class FP8Weight(SummedWeight):
    """A weight [out, in] of e4m3 codes with a scale for each output."""

    def __init__(self, read: Callable[[], Quantised]) -> None:
        self.read = read  # when needed: a layer's parameters may still move to another device

    def product(self, rows: Rows) -> Tensor:
        """Return x Wᵀ; x is quantised once for all the weights that it meets."""
        return fp8.product(rows.derive(quantise_rows), self.read(), rows.tensor.dtype)

    @classmethod
    def summed_gradient(cls, weights: Sequence[FrozenWeight], grads: Sequence[Tensor]) -> Tensor:
        """Return Σ dyᵢ Wᵢ."""
        quantised = [weight.read() for weight in weights if isinstance(weight, cls)]
        return fp8.input_gradient(quantised, grads, grads[0].dtype)


class FP8Linear(nn.Module):
    """y = x Wᵀ + bias with W in FP8.

    Codes and scales are stored as integer parameters: `model.to(dtype)` leaves those unchanged, and DDP does not
    broadcast them in every pass, as it does with buffers. They are not part of the state_dict; `kept` is, if given.

    Args:
        linear: the layer to replace.
        kept: the weight in its own precision, on the host.
    """

    def __init__(self, linear: nn.Linear, kept: Tensor | None = None) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.original_dtype, self.kept = linear.weight.dtype, kept
        codes, scales = quantise_rows(linear.weight.detach())
        self.codes = nn.Parameter(codes.view(torch.uint8), requires_grad=False)
        self.scale_bits = nn.Parameter(scales.view(torch.int32), requires_grad=False)
        self.bias = linear.bias
        self.training = linear.training

    @property
    def quantised(self) -> Quantised:
        """The codes and scales."""
        return Quantised(self.codes.data.view(fp8.CODES), self.scale_bits.data.view(torch.float32))

    @property
    def frozen_weight(self) -> FP8Weight:
        """The weight as fused layers use it."""
        return FP8Weight(lambda: self.quantised)

    @property
    def weight(self) -> Tensor:
        """A dequantised copy in the dtype of the original weight: changing it changes nothing in the layer."""
        return self.quantised.dequantised(self.original_dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output in the dtype of computation, autocast included."""
        y: Tensor = _Product.apply(x.to(compute_dtype(x)), self.quantised)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def extra_repr(self) -> str:
        """Return the sizes, as nn.Linear does."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        if self.bias is not None:
            destination[prefix + "bias"] = self.bias if keep_vars else self.bias.detach()
        if self.kept is not None:
            destination[prefix + "weight"] = self.kept


class _Product(torch.autograd.Function):
    """x Wᵀ, with a gradient for x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Quantised) -> Tensor:
        ctx.weight = weight
        y = fp8.product(quantise_rows(x.reshape(-1, x.shape[-1])), weight, x.dtype)
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        rows = dy.reshape(-1, dy.shape[-1])
        dx = fp8.input_gradient([ctx.weight], [rows], rows.dtype)
        return dx.view(*dy.shape[:-1], -1), None
