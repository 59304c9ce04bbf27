"""Decide: once per optimizer step, from sums to mask and step scales, all blocks of one width at a time."""

from __future__ import annotations

import functools
import zlib
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from nalora import equations
from nalora.config import NALoRAConfig
from nalora.control.plan import BlockPlan
from nalora.distributed import processes
from nalora.kernels.statistics import Sums


@functools.cache
def _projection_limits(config: NALoRAConfig, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """(α, s_min, s_max) of gate, up and down: on the device once, not at every step."""
    projections = (config.gate, config.up, config.down)
    sensitivity, low, high = torch.tensor([[p.sensitivity, p.low, p.high] for p in projections], dtype=dtype).T
    return sensitivity.to(device), low.to(device), high.to(device)


class Decision(NamedTuple):
    """What a step would make of the state of `n` blocks; committed only if the step really happens."""

    mask: Tensor  # [n, width]
    scales: Tensor  # [n, 3], gate, up, down
    valid: Tensor  # [n] bool: the block saw tokens, all of them finite
    shares: Tensor  # [n, 3]
    score: Tensor  # [n]


class BlockGroup:
    """The stacked statistics and state of the blocks that share a width, a dtype, a device and what acts on them.

    The exponential averages live in `mask` and `scales`. Everything stays on the device: invalid blocks are kept by
    `torch.where`, never by asking the host.
    """

    def __init__(
        self,
        names: list[str],
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        mask_acts: bool = True,
        scaling_acts: bool = True,
    ) -> None:
        self.names, self.width, self.kind = names, width, (device, dtype)
        self.mask_acts, self.scaling_acts = mask_acts, scaling_acts
        n = len(names)
        self.stacked = Sums.zeros(n, width, dtype, device)
        self.mask = torch.ones(n, width, dtype=dtype, device=device)
        self.scales = torch.ones(n, 3, dtype=dtype, device=device)
        self.updates = torch.zeros(n, dtype=torch.int64, device=device)
        self.skipped = torch.zeros(n, dtype=torch.int64, device=device)
        self.shares = torch.zeros(n, 3, dtype=dtype, device=device)
        self.score = torch.zeros(n, dtype=dtype, device=device)
        self.stability = torch.zeros(n, dtype=dtype, device=device)

        self._exchange: Tensor | None = None

    STATE = ("mask", "scales", "updates", "skipped", "shares", "score", "stability")

    def sums(self, index: int) -> Sums:
        """The buffers that block `index` accumulates into."""
        return self.stacked.of_block(index)

    @property
    def tokens(self) -> Tensor:
        """How many tokens each block has counted in the current window."""
        return self.stacked.totals()[2]

    def open_window(self) -> None:
        """Start the sums of the next optimizer step."""
        self.stacked.clear()

    @torch.no_grad()
    def decide(self, config: NALoRAConfig, ranks: dist.ProcessGroup | None = None) -> Decision:
        """The next mask and step scales (eq. mask_soft to scale_ema), over the tokens of all data-parallel ranks."""
        sensitivity, regimes, tokens = self._over(ranks)
        k_eff = equations.channel_score(sensitivity, tokens)
        valid = (tokens > 0) & torch.isfinite(k_eff.sum(-1))
        if config.mask_channels == "shuffled":
            k_eff = k_eff.gather(1, self._exchanged(config.mask_seed))
        never = self.updates == 0
        first = never & (config.start == "first")

        if config.keep_ratio == 1:
            mask = torch.ones_like(k_eff)
        else:
            threshold = equations.quantile_threshold(k_eff, config.keep_ratio)
            mask = equations.soft_mask(k_eff, threshold, config.sharpness)
        if config.mask_channels == "frozen":
            mask = torch.where(never[:, None], mask, self.mask)
        else:
            mask = torch.where(first[:, None], mask, equations.ema(self.mask, mask, config.mask_ema))

        shares = equations.regime_shares(regimes, dtype=self.scales.dtype)
        score = equations.regime_score(shares, config.positive_penalty)
        limits = _projection_limits(config, self.scales.dtype, self.scales.device)
        scales = equations.step_scale(score[:, None], *limits)
        scales = torch.where(first[:, None], scales, equations.ema(self.scales, scales, config.scale_ema))
        return Decision(
            mask=torch.where(valid[:, None], mask, self.mask),
            scales=torch.where(valid[:, None], scales, self.scales),
            valid=valid,
            shares=torch.where(valid[:, None], shares, self.shares),
            score=torch.where(valid, score, self.score),
        )

    def _exchanged(self, seed: int) -> Tensor:
        """Which channel's score each channel gets, [n, width]: drawn once from the seed and the block's name."""
        if self._exchange is None:
            drawn = []
            for name in self.names:
                generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
                drawn.append(torch.randperm(self.width, generator=generator))
            self._exchange = torch.stack(drawn).to(self.mask.device)
        return self._exchange

    @torch.no_grad()
    def commit(self, decision: Decision, happened: Tensor | None) -> None:
        """Take the decision over, unless the device says that the optimizer skipped its step."""
        everywhere = (
            torch.ones_like(decision.valid)
            if happened is None
            else happened.to(decision.valid).expand_as(decision.valid)
        )
        taken = decision.valid & everywhere
        change = (decision.mask - self.mask).abs().mean(-1)
        # Into the memory that is there: a captured CUDA graph goes on with the same tensors.
        torch.where(taken, change, self.stability, out=self.stability)
        torch.where(taken[:, None], decision.mask, self.mask, out=self.mask)
        torch.where(taken[:, None], decision.scales, self.scales, out=self.scales)
        torch.where(taken[:, None], decision.shares, self.shares, out=self.shares)
        torch.where(taken, decision.score, self.score, out=self.score)
        self.updates += taken
        self.skipped += everywhere & ~decision.valid

    def _over(self, ranks: dist.ProcessGroup | None) -> tuple[Tensor, Tensor, Tensor]:
        """The sums of all data-parallel ranks, so that every rank decides the same."""
        sensitivity, regimes, tokens = self.stacked.totals()
        if processes.has_several(ranks):
            counts = torch.cat([regimes, tokens[:, None]], dim=1)
            processes.sum_in_group(ranks, sensitivity, counts)
            regimes, tokens = counts[:, :3], counts[:, 3]
        return sensitivity, regimes, tokens


def group_blocks(blocks: tuple[BlockPlan, ...]) -> tuple[list[BlockGroup], dict[str, tuple[BlockGroup, int]]]:
    """Stack the blocks that can be decided together; where each one went."""
    kinds: dict[tuple[int, torch.dtype, torch.device, bool, bool], list[str]] = {}
    for plan in blocks:
        device, dtype = plan.block.statistics_kind
        kind = (plan.block.width, dtype, device, plan.mask, plan.scaling)
        kinds.setdefault(kind, []).append(plan.block.name)
    groups = [BlockGroup(names, *kind) for kind, names in kinds.items()]
    return groups, {name: (group, i) for group in groups for i, name in enumerate(group.names)}
