"""The compiled engine: the reference's sums as one kernel by torch.compile, for any activation that can be traced.

A kernel is compiled once for all blocks and batch shapes that share an activation's name, dtypes and memory layout,
and always for the same trial sizes: the compiler's decisions by size (tiling, threads) do not depend on the first
batch, so a resumed run adds in the same order as an uninterrupted one.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from nalora import equations
from nalora.activations import Activation
from nalora.equations import Elementwise
from nalora.kernels.statistics import reference
from nalora.kernels.statistics.sums import Bounds, Sums, flatten

# The most elements of one call. On a CPU the compiled code keeps σ(z) in memory, 16 MiB then; a call costs about
# 0.3 ms and an element 0.5 ns, so smaller slices would be slower. On a GPU indices stay within 32 bits.
_CPU_ELEMENTS = 1 << 22
_GPU_ELEMENTS = 1 << 30

# The sizes (tokens, width) that a kernel is compiled for, those of a small model. All numbers differ, so that the
# compiler does not assume that two of them are equal.
_TRIAL = (1021, 1536)


@torch.no_grad()
def accumulate(
    sums: Sums, z: Tensor, activation: Activation, bounds: Bounds, u: Tensor | None = None, mask: Tensor | None = None
) -> None:
    """Compute `reference.accumulate` in one pass over z.

    The reference is used if compiling failed, for a single token or channel (torch compiles a size of 1 separately),
    and under a dispatch mode such as a FLOP counter, which torch.compile does not support.
    """
    width = z.shape[-1]
    arguments = (sums, z, activation, bounds, u, mask)
    if width < 2 or z.numel() < 2 * width or is_in_torch_dispatch_mode(include_infra_modes=False):
        return reference.accumulate(*arguments)
    z, u, mask = flatten(z, u, mask)
    z, u, layout = _known_layout(z, u)
    kernel = _kernel_for(_Kind.of(activation, sums, z, u, mask, layout))
    parts = kernel(activation, z, u, mask, _as_tensor(bounds, sums.sensitivity.dtype, z.device))
    if parts is None:
        return reference.accumulate(*arguments)
    for sensitivity, outside in parts:
        sums.sensitivity[0].add_(sensitivity)
        sums.outside[0, 0].add_(outside)
    sums.tokens[0].add_(z.shape[0] if mask is None else mask.sum())


def _reduce(
    function: Elementwise,
    differentiate: bool,
    z: Tensor,
    u: Tensor | None,
    mask: Tensor | None,
    bounds: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return Σ|φ′(z)| per channel and the number of z below and above; `function` is φ if `differentiate`, else φ′."""
    z = z.to(dtype)
    if mask is not None:
        z = torch.where(mask[:, None], z, 0)
    derivative = torch.func.grad(lambda x: function(x).sum())(z) if differentiate else function(z)
    sensitivity = equations.gate_sensitivity(derivative)
    if u is not None:
        sensitivity = sensitivity * u.to(dtype).abs()
    sensitivity = sensitivity + (z - z)  # NaN for a non-finite z, whatever φ′ is there
    lower, upper = bounds.unbind()
    below, above = z < lower, z > upper
    if mask is not None:
        sensitivity = torch.where(mask[:, None], sensitivity, 0)
        below, above = below & mask[:, None], above & mask[:, None]
    # Generated CPU code adds a channel's tokens sequentially: the error of a sum of 512 is 1e-6 in float32, and 6e-8
    # in float64 for a tenth more time. A GPU adds in a tree.
    total = sensitivity.sum(0, dtype=dtype if z.is_cuda else torch.float64).to(dtype)
    counts = [side.sum(0, dtype=torch.int32).sum() for side in (below, above)]
    return total, torch.stack(counts)


class _Kind(NamedTuple):
    """What a kernel is compiled for. The activation is identified by name; torch's guards distinguish namesakes.

    Up to torch 2.11 the guards do not read a function's default values, so that they are part of the kind.
    """

    activation: str
    defaults: str
    sums_dtype: torch.dtype
    z_dtype: torch.dtype
    u_dtype: torch.dtype | None
    masked: bool
    layout: str
    device: torch.device

    @classmethod
    def of(
        cls, activation: Activation, sums: Sums, z: Tensor, u: Tensor | None, mask: Tensor | None, layout: str
    ) -> _Kind:
        u_dtype = None if u is None else u.dtype
        defaults = repr(getattr(activation.phi, "__defaults__", None))
        return cls(
            activation.name, defaults, sums.sensitivity.dtype, z.dtype, u_dtype, mask is not None, layout, z.device
        )


class _Kernel:
    """`_reduce` compiled for one kind; returns None for activations that could not be compiled."""

    def __init__(self, kind: _Kind) -> None:
        self.kind = kind
        # torch counts compilations by code object and gives up at 8, so every kind gets its own copy.
        copy = types.FunctionType(_reduce.__code__.replace(), _reduce.__globals__, _reduce.__name__)
        self.compiled: Callable[..., tuple[Tensor, Tensor]] = torch.compile(copy, dynamic=True, fullgraph=True)
        # Values of `differentiate` to try: the activation's own φ′ first; if that cannot be traced, the gradient of φ.
        self.ways = [False, True]
        self.tried: weakref.WeakSet[Activation] = weakref.WeakSet()
        self.failed: weakref.WeakSet[Activation] = weakref.WeakSet()

    def __call__(
        self, activation: Activation, z: Tensor, u: Tensor | None, mask: Tensor | None, bounds: Tensor
    ) -> list[tuple[Tensor, Tensor]] | None:
        if activation not in self.tried:
            self._try(activation, bounds)
        if not self.ways or activation in self.failed:
            return None
        slices = -(-z.numel() // (_GPU_ELEMENTS if z.is_cuda else _CPU_ELEMENTS))
        parts = [[None] * slices if tensor is None else tensor.tensor_split(slices) for tensor in (z, u, mask)]
        try:
            return [self._run(activation, *part, bounds) for part in zip(*parts, strict=True)]
        except Exception:
            self.failed.add(activation)
            return None

    def _run(self, activation: Activation, *inputs: Tensor | None) -> tuple[Tensor, Tensor]:
        differentiate = self.ways[0]
        function = activation.phi if differentiate else activation.derivative
        return self.compiled(function, differentiate, *inputs, self.kind.sums_dtype)

    def _try(self, activation: Activation, bounds: Tensor) -> None:
        """Compile before the first real batch; the kind's first activation decides whether and how it can be done.

        No failure of a compiler, from untraceable code to a missing header, should end a training run: the reference
        can compute the same.
        """
        first = not self.tried
        self.tried.add(activation)
        while self.ways:
            try:
                self._run(activation, *self._trial_inputs(), bounds)
                return
            except Exception:
                if not first:
                    self.failed.add(activation)
                    return
                del self.ways[0]

    def _trial_inputs(self) -> tuple[Tensor | None, ...]:
        kind, (tokens, width) = self.kind, _TRIAL
        columns = width if kind.layout == "whole" else 2 * width
        z, u = (
            None if dtype is None else torch.zeros(tokens, columns, dtype=dtype, device=kind.device)[:, :width]
            for dtype in (kind.z_dtype, kind.u_dtype)
        )
        return z, u, torch.ones(tokens, dtype=torch.bool, device=kind.device) if kind.masked else None


_kernel_for = cache(_Kernel)


@cache
def _as_tensor(bounds: Bounds, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the bounds as an input of the kernel, so that other bounds need no other kernel."""
    return torch.tensor(bounds, dtype=dtype, device=device)


def _known_layout(z: Tensor, u: Tensor | None) -> tuple[Tensor, Tensor | None, str]:
    """Return z and u both contiguous, or both columns of wider rows as from a fused gate_up layer; else copies."""
    both = [z] if u is None else [z, u]
    if all(tensor.is_contiguous() for tensor in both):
        return z, u, "whole"
    stride = z.stride()
    if all(tensor.stride() == stride and stride[1] == 1 and stride[0] > tensor.shape[1] for tensor in both):
        return z, u, "columns"
    return z.contiguous(), None if u is None else u.contiguous(), "whole"
