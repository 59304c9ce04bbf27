"""The controller's state as numbers for loggers: values applied to the steps, and values computed but not applied.

The controller computes mask and step scales of every block, also where they act on nothing: step scaling of the GELU
family under ``regimes="paper"``, a control that the configuration switches off, a projection without an adapter.
``scale_*``, ``mask_mean``, ``kept_share`` and ``stability`` describe the factors that multiply a step, so they are
neutral (1, 1, 1 and 0) where nothing acts; the values that are not applied have names that start with ``followed_``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from nalora.config import PROJECTIONS
from nalora.control.decision import BlockGroup
from nalora.control.plan import BlockPlan

# The value of each measure where the control is off: the factor 1, all channels kept, no change.
NEUTRAL = dict.fromkeys(("scale_gate", "scale_up", "scale_down", "mask_mean", "kept_share"), 1.0) | {"stability": 0.0}
# 1 where the control acts, else 0; the mean over blocks is their share.
ACTS = ("mask_acts", "scaling_acts")
NAMES = ("p_sup", "p_res", "p_pos", "a", *NEUTRAL, "skipped_updates")
# The first measures are those of z: regime shares and score.
_SHARES = 4
FOLLOWED = {name: f"followed_{name}" for name in NEUTRAL}


def measure(
    groups: list[BlockGroup], plans: Sequence[BlockPlan], *, preserve_mean: bool, per_block: bool
) -> dict[str, float]:
    """Return means over all blocks (skipped updates: their sum), and with `per_block` each block's values.

    A block without a control counts with the neutral value. Means of ``followed_…`` are over the blocks in which the
    value is computed without being applied. Waits for the GPU, with one transfer per group.
    """
    computed = _computed(groups)
    by_block = {
        plan.block.name: _of_block(computed[plan.block.name], plan, preserve_mean=preserve_mean) for plan in plans
    }
    result: dict[str, float] = {}
    for name in (*NAMES, *ACTS, *FOLLOWED.values()):
        values = [block[name] for block in by_block.values() if name in block]
        if values:
            total = sum(values)
            result[name] = total if name == "skipped_updates" else total / len(values)
    if per_block:
        for block, values_of in by_block.items():
            result |= {f"{block}/{name}": value for name, value in values_of.items()}
    return result


def unapplied(scaled: Collection[str], *, mask: bool, preserve_mean: bool) -> frozenset[str]:
    """Return the measures of a block whose computed value is not applied.

    `scaled` are the projections with an adapter whose steps are scaled, `mask` is whether the mask acts.
    """
    measures = {f"scale_{role}" for role in PROJECTIONS if role not in scaled}
    if not mask:
        measures |= {"mask_mean", "kept_share", "stability"}
    elif preserve_mean:
        measures.add("mask_mean")  # divided by its mean, the applied mask has the mean 1
    return frozenset(measures)


def _computed(groups: list[BlockGroup]) -> dict[str, dict[str, float]]:
    """Return the controller's state by block."""
    state: dict[str, dict[str, float]] = {}
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
        values = torch.stack(columns, dim=1)
        if group.experts:
            values = _over_experts(values.view(len(group.names), group.experts, -1), group.updates > 0)
        for name, row in zip(group.names, values.cpu().double().tolist(), strict=True):
            state[name] = dict(zip(NAMES, row, strict=True))
    return state


def _over_experts(values: Tensor, seen: Tensor) -> Tensor:
    """Return the means over the experts of each block, of shares and score over those that had tokens so far.

    `values` are [blocks, experts, measures]. Skipped updates are summed.
    """
    known = seen.view(*values.shape[:2], 1).to(values)
    shares = (values[..., :_SHARES] * known).sum(1) / known.sum(1).clamp_min(1)
    return torch.cat([shares, values[..., _SHARES:-1].mean(1), values[..., -1:].sum(1)], dim=-1)


def _of_block(computed: dict[str, float], plan: BlockPlan, *, preserve_mean: bool) -> dict[str, float]:
    scaled = [role for role, projection in plan.block.projections.items() if plan.scaling and projection.adapted]
    off = unapplied(scaled, mask=plan.mask, preserve_mean=preserve_mean)
    applied = {name: NEUTRAL[name] if name in off else value for name, value in computed.items()}
    acts = {"mask_acts": float(plan.mask), "scaling_acts": float(plan.scaling)}
    return {**applied, **acts, **{FOLLOWED[name]: computed[name] for name in NEUTRAL if name in off}}
