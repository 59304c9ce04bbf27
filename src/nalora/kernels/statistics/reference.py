"""The reference engine: plain torch, any device and float dtype, a bounded working set."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nalora import equations
from nalora.activations import Activation
from nalora.kernels.statistics.sums import Sums

# z is reduced in slices of this many elements, so that temporaries stay in cache on a CPU (1 MiB of float32)
# and are small beside z on a GPU.
_CPU_ELEMENTS = 1 << 18
_GPU_ELEMENTS = 1 << 23


@torch.no_grad()
def accumulate(
    sums: Sums,
    z: Tensor,
    activation: Activation,
    thresholds: tuple[float, float],
    u: Tensor | None = None,
    token_mask: Tensor | None = None,
) -> None:
    """Add the tokens of z to `sums`: eq. keff_elem, kout_channel and regime_probs before their division.

    Args:
        sums: the block's buffers, changed in place.
        z: gate pre-activations, shape [..., width], any strides.
        activation: what follows the gate.
        thresholds: (lower, upper) of the responsive regime, both inclusive.
        u: the factor beside φ(z), shape of z, where channels are ranked by utility.
        token_mask: which tokens count, boolean, shape z.shape[:-1].
    """
    width = z.shape[-1]
    z = z.reshape(-1, width)
    u = None if u is None else u.reshape(-1, width)
    token_mask = None if token_mask is None else token_mask.reshape(-1)
    if token_mask is not None and _on_host(z):
        # Nobody waits for a CPU: the real tokens alone are cheaper than all of them under a mask.
        z, u, token_mask = z[token_mask], None if u is None else u[token_mask], None
    tokens_at_once = max(1, (_GPU_ELEMENTS if z.is_cuda else _CPU_ELEMENTS) // width)
    for start in range(0, z.shape[0], tokens_at_once):
        part = slice(start, start + tokens_at_once)
        _accumulate_part(
            sums,
            z[part],
            activation,
            thresholds,
            None if u is None else u[part],
            None if token_mask is None else token_mask[part],
        )


def _accumulate_part(
    sums: Sums,
    z: Tensor,
    activation: Activation,
    thresholds: tuple[float, float],
    u: Tensor | None,
    token_mask: Tensor | None,
) -> None:
    dtype = sums.sensitivity.dtype
    z = z.to(dtype)
    if token_mask is not None:
        z = torch.where(token_mask[:, None], z, 0)
    sensitivity = equations.gate_sensitivity(activation.derivative(z))
    if u is not None:
        u = u.to(dtype).abs()
        # Whatever a pad token carries, NaN included, must not reach the product.
        sensitivity = sensitivity * (u if token_mask is None else torch.where(token_mask[:, None], u, 0))
    below, above = _as_ones(torch.lt, z, thresholds[0]), _as_ones(torch.gt, z, thresholds[1])
    if token_mask is None:
        sums.sensitivity[0].add_(sensitivity.sum(0))
        sums.tokens[0].add_(z.shape[0])
    else:
        sums.sensitivity[0].add_(token_mask.to(dtype) @ sensitivity)
        sums.tokens[0].add_(token_mask.sum())
        below, above = below * token_mask[:, None], above * token_mask[:, None]
    sums.outside[0, 0].add_(torch.stack([below.sum(), above.sum()]).to(torch.int64))
    if z.numel():
        low, high = torch.aminmax(z)
        sums.sensitivity[0].add_((high - high) + (low - low))


def _as_ones(comparison: Callable[..., Tensor], z: Tensor, threshold: float) -> Tensor:
    """1 where the comparison holds, else 0, in z's dtype.

    On a CPU two thirds of the time of booleans and their sum. Exact: fewer than 2²⁴ of them are summed at a time.
    """
    return comparison(z, threshold, out=torch.empty_like(z))


def _on_host(z: Tensor) -> bool:
    return z.device.type == "cpu"
