"""The controller's state as numbers for loggers."""

from __future__ import annotations

import torch
from torch import Tensor

from nalora.decision import BlockGroup

NAMES = (
    "p_sup",
    "p_res",
    "p_pos",
    "a",
    "scale_gate",
    "scale_up",
    "scale_down",
    "mask_mean",
    "kept_share",
    "stability",
    "skipped_updates",
)


def measure(groups: list[BlockGroup], blocks: list[str], per_block: bool) -> dict[str, float]:
    """Means over all blocks (skipped updates: their sum), and each block's own values where asked for.

    The one place that waits for the device, with one transfer per group.
    """
    values: dict[str, Tensor] = {}
    for group in groups:
        dtype = group.mask.dtype
        columns = [
            *group.shares.unbind(1),
            group.score,
            *group.scales.unbind(1),
            group.mask.mean(-1),
            (group.mask > 0.5).to(dtype).mean(-1),
            group.stability,
            group.skipped.to(dtype),
        ]
        values |= dict(zip(group.names, torch.stack(columns, dim=1).cpu().double(), strict=True))
    table = torch.stack([values[block] for block in blocks])
    result = dict(zip(NAMES, table.mean(0).tolist(), strict=True))
    result["skipped_updates"] = table[:, -1].sum().item()
    if per_block:
        for block, row in zip(blocks, table.tolist(), strict=True):
            result |= {f"{block}/{name}": value for name, value in zip(NAMES, row, strict=True)}
    return result
