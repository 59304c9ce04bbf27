"""Statistics of experts: every row of z belongs to one expert of a layer and is added to the sums of that expert."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nalora import equations
from nalora.activations import Activation
from nalora.kernels.statistics.sums import Bounds, Sums

# The most elements of z whose temporaries exist at a time on a device, as in the reference.
_DEVICE_ELEMENTS = 1 << 23


@torch.no_grad()
def accumulate_by_expert(
    accumulate: Callable[..., None],
    sums: Sums,
    experts: Tensor,
    z: Tensor,
    activation: Activation,
    bounds: Bounds,
    u: Tensor | None = None,
    mask: Tensor | None = None,
) -> None:
    """Add every row of z to the sums of its expert.

    Args:
        accumulate: the engine that adds the rows of one expert on a CPU.
        sums: the stacked buffers of the experts, one part each, changed in place.
        experts: the expert of every row, int64, in ascending order.
        z: gate pre-activations, shape [rows, width], any strides.
        activation: the activation of the gate.
        bounds: (lower, upper) of the responsive regime, both inclusive.
        u: the factor that φ(z) is multiplied by, of z's shape, if channels are ranked by utility.
        mask: which rows count, boolean, shape [rows].
    """
    ends = torch.searchsorted(experts, torch.arange(sums.tokens.shape[0] + 1, device=experts.device))
    if z.device.type != "cpu":
        add_segments(sums, ends, z, activation, bounds, u, mask)
        return
    # Nothing is asynchronous on a CPU, so the boundaries can be read; experts without rows are skipped.
    cuts = ends.tolist()
    present = range(int(experts[0]), int(experts[-1]) + 1) if len(experts) else ()
    for expert in (expert for expert in present if cuts[expert] < cuts[expert + 1]):
        rows = slice(cuts[expert], cuts[expert + 1])
        others = (None if tensor is None else tensor[rows] for tensor in (u, mask))
        accumulate(sums.of_block(expert), z[rows], activation, bounds, *others)


def add_segments(
    sums: Sums, ends: Tensor, z: Tensor, activation: Activation, bounds: Bounds, u: Tensor | None, mask: Tensor | None
) -> None:
    """Add the rows of all experts without waiting for the device: expert e has rows ends[e] to ends[e + 1].

    Every segment is summed in a fixed order, so the result is reproducible, which sums by atomic additions are not.
    """
    size = max(1, _DEVICE_ELEMENTS // z.shape[-1])
    for start in range(0, z.shape[0], size):
        rows = slice(start, start + size)
        part_u, part_mask = (None if tensor is None else tensor[rows] for tensor in (u, mask))
        sensitivity, counts = _of_rows(sums.sensitivity.dtype, z[rows], activation, bounds, part_u, part_mask)
        cuts = ends.clamp(start, start + sensitivity.shape[0]) - start
        sums.sensitivity[:, 0].add_(_sum_segments(sensitivity, cuts))
        by_expert = _sum_segments(counts, cuts).to(torch.int64)
        sums.outside[:, 0, 0].add_(by_expert[:, :2])
        sums.tokens[:, 0].add_(by_expert[:, 2])


def _of_rows(
    dtype: torch.dtype, z: Tensor, activation: Activation, bounds: Bounds, u: Tensor | None, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return |φ′(z)| (times |u|) of every row, NaN for a row with a non-finite z, and its counts (below, above, 1)."""
    z = z.to(dtype)
    counted = torch.ones_like(z[:, 0], dtype=torch.bool) if mask is None else mask
    if mask is not None:
        z = torch.where(mask[:, None], z, 0)
    sensitivity = equations.gate_sensitivity(activation.derivative(z))
    if u is not None:
        sensitivity = sensitivity * u.to(dtype).abs()
    if mask is not None:
        sensitivity = torch.where(mask[:, None], sensitivity, 0)
    sensitivity = sensitivity + (z - z).sum(1, keepdim=True)
    below, above = (((z < bounds[0]) & counted[:, None]).sum(1), ((z > bounds[1]) & counted[:, None]).sum(1))
    # As float64, in which counts are exact up to 2⁵³: there is no sum of segments of integers.
    return sensitivity, torch.stack([below, above, counted], dim=1).double()


def _sum_segments(values: Tensor, cuts: Tensor) -> Tensor:
    # "unsafe" leaves out a check of the offsets that waits for the device.
    total: Tensor = torch.segment_reduce(values, "sum", offsets=cuts, axis=0, unsafe=True, initial=0)
    return total
