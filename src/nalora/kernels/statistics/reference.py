"""The reference engine: plain PyTorch on any device, in any float dtype, with bounded memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nalora import equations
from nalora.activations import Activation
from nalora.kernels.statistics.sums import Bounds, Sums, flatten

# z is reduced in slices of this many elements, so that temporaries fit into a CPU's cache (1 MiB of float32) and are
# small compared with z on a GPU.
_CPU_ELEMENTS = 1 << 18
_GPU_ELEMENTS = 1 << 23


@torch.no_grad()
def accumulate(
    sums: Sums, z: Tensor, activation: Activation, bounds: Bounds, u: Tensor | None = None, mask: Tensor | None = None
) -> None:
    """Add the tokens of z to `sums`: eq. keff_elem, kout_channel and regime_probs before their division.

    Args:
        sums: the block's buffers, changed in place.
        z: gate pre-activations, shape [..., width], any strides.
        activation: the activation of the gate.
        bounds: (lower, upper) of the responsive regime, both inclusive.
        u: the factor that φ(z) is multiplied by, of z's shape, if channels are ranked by utility.
        mask: which tokens count, boolean, shape z.shape[:-1].
    """
    z, u, mask = flatten(z, u, mask)
    if mask is not None and _on_host(z):
        # On a CPU nothing is asynchronous: selecting the real tokens is cheaper than computing all with a mask.
        z, u, mask = z[mask], None if u is None else u[mask], None
    size = max(1, (_GPU_ELEMENTS if z.is_cuda else _CPU_ELEMENTS) // z.shape[-1])
    for start in range(0, z.shape[0], size):
        part = slice(start, start + size)
        rest = (None if tensor is None else tensor[part] for tensor in (u, mask))
        _accumulate_part(sums, activation, bounds, z[part], *rest)


def _accumulate_part(
    sums: Sums, activation: Activation, bounds: Bounds, z: Tensor, u: Tensor | None, mask: Tensor | None
) -> None:
    dtype = sums.sensitivity.dtype
    z = z.to(dtype)
    if mask is not None:
        z = torch.where(mask[:, None], z, 0)
    sensitivity = equations.gate_sensitivity(activation.derivative(z))
    if u is not None:
        u = u.to(dtype).abs()
        # The values of padding tokens, NaN included, must not reach the product.
        sensitivity = sensitivity * (u if mask is None else torch.where(mask[:, None], u, 0))
    below, above = _as_ones(torch.lt, z, bounds[0]), _as_ones(torch.gt, z, bounds[1])
    if mask is None:
        sums.sensitivity[0].add_(sensitivity.sum(0))
        sums.tokens[0].add_(z.shape[0])
    else:
        sums.sensitivity[0].add_(mask.to(dtype) @ sensitivity)
        sums.tokens[0].add_(mask.sum())
        below, above = below * mask[:, None], above * mask[:, None]
    sums.outside[0, 0].add_(torch.stack([below.sum(), above.sum()]).to(torch.int64))
    if z.numel():
        low, high = torch.aminmax(z)
        sums.sensitivity[0].add_((high - high) + (low - low))


def _as_ones(comparison: Callable[..., Tensor], z: Tensor, threshold: float) -> Tensor:
    """Return 1 where the comparison holds, else 0, in z's dtype.

    On a CPU this takes two thirds of the time of booleans and their sum. It is exact: fewer than 2²⁴ are summed.
    """
    return comparison(z, threshold, out=torch.empty_like(z))


def _on_host(z: Tensor) -> bool:
    return z.device.type == "cpu"
