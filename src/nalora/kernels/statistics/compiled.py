"""The compiled engine: the reference's sums as one kernel that torch.compile writes, for any activation it can trace.

A kernel is compiled once for all blocks and batch shapes that share an activation's name, dtypes and memory layout,
and always for the same trial sizes: what the compiler decides by size (tiling, threads) never depends on the batch
that happens to come first, so a resumed run adds in the same order as one that was never interrupted.
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
from nalora.kernels.statistics.sums import Sums

# One call takes at most this many elements. On a CPU the compiler keeps σ(z) in memory, 16 MiB then; a call costs
# about 0.3 ms beside 0.5 ns for each element, so smaller slices would not pay. On a GPU indices stay within 32 bits.
_CPU_ELEMENTS = 1 << 22
_GPU_ELEMENTS = 1 << 30

# The sizes a kernel is compiled for, (tokens, width): those of a small model. All numbers differ, lest the compiler
# take two of them for the same.
_TRIAL = (1021, 1536)


@torch.no_grad()
def accumulate(
    sums: Sums,
    z: Tensor,
    activation: Activation,
    thresholds: tuple[float, float],
    u: Tensor | None = None,
    token_mask: Tensor | None = None,
) -> None:
    """Add the tokens of z to `sums`, as `nalora.kernels.statistics.reference.accumulate` does, in one pass over z.

    The reference serves where compiling failed, for a single token or channel (torch compiles a size of 1 anew), and
    under a dispatch mode such as a FLOP counter, which torch.compile refuses.
    """
    width = z.shape[-1]
    given = (sums, z, activation, thresholds, u, token_mask)
    if width < 2 or z.numel() < 2 * width or is_in_torch_dispatch_mode(include_infra_modes=False):
        return reference.accumulate(*given)
    z, u, layout = _in_a_known_layout(z.reshape(-1, width), None if u is None else u.reshape(-1, width))
    mask = None if token_mask is None else token_mask.reshape(-1)
    kernel = _kernel_for(_Kind.of(activation, sums, z, u, mask, layout))
    found = kernel(activation, z, u, mask, _as_tensor(thresholds, sums.sensitivity.dtype, z.device))
    if found is None:
        return reference.accumulate(*given)
    for sensitivity, outside in found:
        sums.sensitivity[0].add_(sensitivity)
        sums.outside[0, 0].add_(outside)
    sums.tokens[0].add_(z.shape[0] if mask is None else mask.sum())


def _reduce(
    function: Elementwise,
    differentiate: bool,
    z: Tensor,
    u: Tensor | None,
    mask: Tensor | None,
    thresholds: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Σ|φ′(z)| per channel and how many z lie below and above; what is compiled. `function` is φ′, or else φ."""
    z = z.to(dtype)
    if mask is not None:
        z = torch.where(mask[:, None], z, 0)
    derivative = torch.func.grad(lambda x: function(x).sum())(z) if differentiate else function(z)
    sensitivity = equations.gate_sensitivity(derivative)
    if u is not None:
        sensitivity = sensitivity * u.to(dtype).abs()
    sensitivity = sensitivity + (z - z)  # NaN for a non-finite z, whatever φ′ makes of it
    lower, upper = thresholds.unbind()
    below, above = z < lower, z > upper
    if mask is not None:
        sensitivity = torch.where(mask[:, None], sensitivity, 0)
        below, above = below & mask[:, None], above & mask[:, None]
    # Generated CPU code adds a channel's tokens one after the other: in float32 the sum of 512 is off by 1e-6, in
    # float64 by 6e-8 for a tenth more time. A GPU adds in a tree.
    total = sensitivity.sum(0, dtype=dtype if z.is_cuda else torch.float64).to(dtype)
    counts = [each.sum(0, dtype=torch.int32).sum() for each in (below, above)]
    return total, torch.stack(counts)


class _Kind(NamedTuple):
    """What a kernel is compiled for. The activation is known by name here; torch's guards tell namesakes apart."""

    activation: str
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
        return cls(activation.name, sums.sensitivity.dtype, z.dtype, u_dtype, mask is not None, layout, z.device)


class _Kernel:
    """`_reduce` compiled for one kind; None instead of sums for activations that it could not be compiled for."""

    def __init__(self, kind: _Kind) -> None:
        self.kind = kind
        # torch counts compilations by code object and gives up at 8: every kind gets a copy of its own.
        copy = types.FunctionType(_reduce.__code__.replace(), _reduce.__globals__, _reduce.__name__)
        self.compiled: Callable[..., tuple[Tensor, Tensor]] = torch.compile(copy, dynamic=True, fullgraph=True)
        # φ′ as the activation gives it, or, where that is autograd's and cannot be traced, the gradient of φ.
        self.ways = [False, True]
        self.tried: weakref.WeakSet[Activation] = weakref.WeakSet()
        self.refused: weakref.WeakSet[Activation] = weakref.WeakSet()

    def __call__(
        self, activation: Activation, z: Tensor, u: Tensor | None, mask: Tensor | None, thresholds: Tensor
    ) -> list[tuple[Tensor, Tensor]] | None:
        if activation not in self.tried:
            self._try(activation, thresholds)
        if not self.ways or activation in self.refused:
            return None
        slices = -(-z.numel() // (_GPU_ELEMENTS if z.is_cuda else _CPU_ELEMENTS))
        parts = [[None] * slices if each is None else each.tensor_split(slices) for each in (z, u, mask)]
        try:
            return [self._run(activation, *part, thresholds) for part in zip(*parts, strict=True)]
        except Exception:
            self.refused.add(activation)
            return None

    def _run(self, activation: Activation, *inputs: Tensor | None) -> tuple[Tensor, Tensor]:
        differentiate = self.ways[0]
        function = activation.phi if differentiate else activation.derivative
        return self.compiled(function, differentiate, *inputs, self.kind.sums_dtype)

    def _try(self, activation: Activation, thresholds: Tensor) -> None:
        """Compile before the first real batch; the kind's first activation settles whether and how it can be done.

        Whatever goes wrong in a compiler, from untraceable code to a missing header, is no reason to end a training
        run that the reference can serve.
        """
        first = not self.tried
        self.tried.add(activation)
        while self.ways:
            try:
                self._run(activation, *self._trial_inputs(), thresholds)
                return
            except Exception:
                if not first:
                    self.refused.add(activation)
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


@cache
def _kernel_for(kind: _Kind) -> _Kernel:
    return _Kernel(kind)


@cache
def _as_tensor(thresholds: tuple[float, float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """As an input of the kernel, so that other thresholds need no other kernel."""
    return torch.tensor(thresholds, dtype=dtype, device=device)


def _in_a_known_layout(z: Tensor, u: Tensor | None) -> tuple[Tensor, Tensor | None, str]:
    """z and u both whole, or both some columns of wider rows as a fused gate_up layer gives; else copied."""
    both = [z] if u is None else [z, u]
    if all(each.is_contiguous() for each in both):
        return z, u, "whole"
    if all(each.stride() == z.stride() and each.stride(1) == 1 and each.stride(0) > each.shape[1] for each in both):
        return z, u, "columns"
    return z.contiguous(), None if u is None else u.contiguous(), "whole"
