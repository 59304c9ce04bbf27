"""A frozen linear layer whose weight is stored in FP8, in place of the base layer below an adapter.

The layer works anywhere a linear layer does: PEFT's own forward, evaluation and generation call it, and fused layers
use its weight directly. Gradients flow to the input; the weight is not trainable.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nalora.kernels.fused import fp8
from nalora.kernels.fused.backward_pass import backward_pass
from nalora.kernels.fused.fp8 import Quantised, quantise_rows
from nalora.kernels.fused.frozen import FrozenWeight, Rows, SummedWeight
from nalora.kernels.fused.lora_linear import compute_dtype, in_shape


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
        if not x.numel():
            dtype = compute_dtype(x)
            bias = None if self.bias is None else self.bias.to(dtype)
            return nn.functional.linear(x.to(dtype), self.weight.to(dtype), bias)
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

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FP8Linear:
        """Move the layer, and note a new dtype of the model, in which the original weight is put back."""
        super()._apply(fn, recurse)
        dtype = fn(torch.empty(0, dtype=self.original_dtype)).dtype
        if dtype is not self.original_dtype and dtype.is_floating_point:
            self.original_dtype = dtype
            self.kept = None if self.kept is None else self.kept.to(dtype)
        return self

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Load a weight in its own precision, as it is saved if it was kept; without one the codes stay."""
        own: dict[str, Tensor] = {} if self.bias is None else {"bias": self.bias.data}
        if self.kept is not None or prefix + "weight" in state_dict:
            own["weight"] = self.weight
        for name, target in own.items():
            loaded = state_dict.get(prefix + name)
            if loaded is None:
                missing_keys.append(prefix + name)
            elif loaded.shape != target.shape:
                error_msgs.append(f"{prefix}{name}: shape {tuple(loaded.shape)}, expected {tuple(target.shape)}")
            else:
                target.copy_(loaded)
                if name == "weight":
                    self._store(loaded.to(target))
        found = (key for key in state_dict if key.startswith(prefix) and key[len(prefix) :] not in own)
        unexpected_keys.extend(found if strict else ())

    def _store(self, weight: Tensor) -> None:
        codes, scales = quantise_rows(weight)
        self.codes.data.copy_(codes.view(torch.uint8))
        self.scale_bits.data.copy_(scales.view(torch.int32))
        if self.kept is not None:
            self.kept.copy_(weight)


class _Product(torch.autograd.Function):
    """x Wᵀ, with a gradient for x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Quantised) -> Tensor:
        ctx.weight = weight
        y = fp8.product(quantise_rows(x.reshape(-1, x.shape[-1])), weight, x.dtype)
        return in_shape(y, x.shape)

    @staticmethod
    @backward_pass
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        rows = dy.reshape(-1, dy.shape[-1])
        dx = fp8.input_gradient([ctx.weight], [rows], rows.dtype)
        return dx.view(*dy.shape[:-1], -1), None
