"""The decision of an optimizer step: mask and step scales from the sums, for all blocks of one width together."""

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
    """Return (α, s_min, s_max) of gate, up and down, copied to the device once and not at every step."""
    projections = (config.gate, config.up, config.down)
    sensitivity, low, high = torch.tensor([[p.sensitivity, p.low, p.high] for p in projections], dtype=dtype).T
    return sensitivity.to(device), low.to(device), high.to(device)


class Decision(NamedTuple):
    """The next state of `n` blocks or experts; it takes effect only if the optimizer's step happens."""

    mask: Tensor  # [n, width]
    scales: Tensor  # [n, 3], gate, up, down
    valid: Tensor  # [n] bool: the block saw tokens, all of them finite
    shares: Tensor  # [n, 3]
    score: Tensor  # [n]
    skipped: Tensor | None = None  # [n] bool: an update is missing; by default wherever it is not valid


class BlockGroup:
    """The stacked statistics and state of blocks with the same width, dtype, device and active controls.

    A block of experts takes one row for each of them, a dense block (`experts` = 0) one row.
    `mask` and `scales` are exponential moving averages. Everything stays on the device: invalid blocks keep their
    state by `torch.where`, without waiting for the GPU.
    """

    STATE = ("mask", "scales", "updates", "skipped", "shares", "score", "stability")

    def __init__(
        self,
        names: list[str],
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        mask_acts: bool = True,
        scaling_acts: bool = True,
        experts: int = 0,
    ) -> None:
        self.names, self.width, self.kind = names, width, (device, dtype)
        self.mask_acts, self.scaling_acts, self.experts = mask_acts, scaling_acts, experts
        n = len(names) * max(1, experts)
        self.stacked = Sums.zeros(n, width, dtype, device, parts=1 if experts else None)
        self.mask = torch.ones(n, width, dtype=dtype, device=device)
        self.scales = torch.ones(n, 3, dtype=dtype, device=device)
        self.updates, self.skipped = torch.zeros(2, n, dtype=torch.int64, device=device).unbind()
        self.shares = torch.zeros(n, 3, dtype=dtype, device=device)
        self.score, self.stability = torch.zeros(2, n, dtype=dtype, device=device).unbind()
        self._permutations: Tensor | None = None

    def indices(self, index: int) -> range:
        """Return the rows of block `index`."""
        number = max(1, self.experts)
        return range(index * number, (index + 1) * number)

    def of_block(self, field: Tensor, index: int) -> Tensor:
        """Return block `index` of a stacked tensor; of experts, all of them."""
        rows = self.indices(index)
        return field[rows.start : rows.stop] if self.experts else field[index]

    def sums(self, index: int) -> Sums:
        """Return the buffers that block `index` accumulates into; of experts, stacked ones."""
        return Sums(*(self.of_block(tensor, index) for tensor in self.stacked))

    @property
    def tokens(self) -> Tensor:
        """The number of tokens that each block has counted in the current window."""
        return self.stacked.totals()[2]

    def open_window(self) -> None:
        """Zero the sums for the next optimizer step."""
        self.stacked.clear()

    @torch.no_grad()
    def decide(self, config: NALoRAConfig, ranks: dist.ProcessGroup | None = None) -> Decision:
        """Return the next mask and step scales (eq. mask_soft to scale_ema), from the tokens of all ranks."""
        sensitivity, regimes, tokens = self._totals(ranks)
        k_eff = equations.channel_score(sensitivity, tokens)
        valid = (tokens > 0) & torch.isfinite(k_eff.sum(-1))
        if config.mask_channels == "shuffled":
            k_eff = k_eff.gather(1, self._permuted(config.mask_seed))
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
            skipped=self._skipped(valid, tokens),
        )

    def _skipped(self, valid: Tensor, tokens: Tensor) -> Tensor:
        """Return where an update is missing; an expert without tokens misses none if others of its layer have some."""
        if not self.experts:
            return ~valid
        routed = tokens.view(-1, self.experts).sum(1, keepdim=True).expand(-1, self.experts).reshape(-1)
        return ~valid & ((tokens > 0) | (routed == 0))

    def _permuted(self, seed: int) -> Tensor:
        """Return the channel whose score each channel gets, [n, width]: random by the seed and the block's name."""
        if self._permutations is None:
            names = [f"{name}.{e}" for name in self.names for e in range(self.experts)] if self.experts else self.names
            seeds = [zlib.crc32(f"{seed} {name}".encode()) for name in names]
            drawn = [torch.randperm(self.width, generator=torch.Generator().manual_seed(value)) for value in seeds]
            self._permutations = torch.stack(drawn).to(self.mask.device)
        return self._permutations

    @torch.no_grad()
    def commit(self, decision: Decision, happened: Tensor | None) -> None:
        """Make a decision the state, except where `happened`, a boolean on the device, reports a skipped step."""
        valid = decision.valid
        stepped = torch.ones_like(valid) if happened is None else happened.to(valid).expand_as(valid)
        taken = valid & stepped
        change = (decision.mask - self.mask).abs().mean(-1)
        # Into the existing memory, since a captured CUDA graph keeps using these tensors.
        torch.where(taken, change, self.stability, out=self.stability)
        torch.where(taken[:, None], decision.mask, self.mask, out=self.mask)
        torch.where(taken[:, None], decision.scales, self.scales, out=self.scales)
        torch.where(taken[:, None], decision.shares, self.shares, out=self.shares)
        torch.where(taken, decision.score, self.score, out=self.score)
        self.updates += taken
        self.skipped += stepped & (~valid if decision.skipped is None else decision.skipped)

    def _totals(self, ranks: dist.ProcessGroup | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the sums over all data-parallel ranks, so that every rank makes the same decision."""
        sensitivity, regimes, tokens = self.stacked.totals()
        if processes.has_several(ranks):
            counts = torch.cat([regimes, tokens[:, None]], dim=1)
            processes.sum_in_group(ranks, sensitivity, counts)
            regimes, tokens = counts[:, :3], counts[:, 3]
        return sensitivity, regimes, tokens


def group_blocks(blocks: tuple[BlockPlan, ...]) -> tuple[list[BlockGroup], dict[str, tuple[BlockGroup, int]]]:
    """Group the blocks that can be decided together; return the groups, and each block's group and index."""
    kinds: dict[tuple[int, torch.dtype, torch.device, bool, bool, int], list[str]] = {}
    for plan in blocks:
        device, dtype = plan.block.statistics_kind
        experts = plan.block.experts.number if plan.block.experts else 0
        kind = (plan.block.width, dtype, device, plan.mask, plan.scaling, experts)
        kinds.setdefault(kind, []).append(plan.block.name)
    groups = [BlockGroup(names, *kind) for kind, names in kinds.items()]
    return groups, {name: (group, i) for group in groups for i, name in enumerate(group.names)}
