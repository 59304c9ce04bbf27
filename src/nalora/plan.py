"""The plan: every FFN block found, which controls act on it, and why one does not."""

from __future__ import annotations

import re
from dataclasses import dataclass

from nalora.blocks import Discovery, FFNBlock
from nalora.config import NALoRAConfig
from nalora.errors import NALoRAError
from nalora.statistics import Engine, choose


@dataclass(frozen=True)
class BlockPlan:
    """The controls of one block. A reason is empty where the control acts."""

    block: FFNBlock
    thresholds: tuple[float, float]
    mask_off: str
    scaling_off: str
    engine: Engine

    @property
    def mask(self) -> bool:
        """Whether the channel mask acts on the rows of the gate's B."""
        return not self.mask_off

    @property
    def scaling(self) -> bool:
        """Whether the step scales act on the block's adapters."""
        return not self.scaling_off


@dataclass(frozen=True)
class Plan:
    """All blocks in model order, the adapters refused with the reason, the adapters that stay plain LoRA."""

    config: NALoRAConfig
    blocks: tuple[BlockPlan, ...]
    refused: dict[str, str]
    others: tuple[str, ...]

    @property
    def statistics(self) -> str:
        """The names of the engines that compute the blocks' statistics."""
        return ", ".join(dict.fromkeys(each.engine.name for each in self.blocks))

    def rows(self) -> list[tuple[str, ...]]:
        """One row for each run of alike blocks: name, layers, activation, width, regimes, mask, scaling."""
        groups: dict[tuple[str, ...], list[str]] = {}
        for each in self.blocks:
            block = each.block
            parts = ", ".join(
                f"{role} {_tail(p.name)}{_rows(p.rows)}{'' if p.adapted else ' (no adapter)'}"
                for role, p in block.projections.items()
            )
            lower, upper = each.thresholds
            features = (
                re.sub(r"\.\d+\b", ".*", block.name),
                parts,
                block.activation.name,
                str(block.width),
                f"{lower:+.3f} … {upper:+.3f}" if lower < upper else "–",
                "on" if each.mask else f"off: {each.mask_off}",
                "on" if each.scaling else f"off: {each.scaling_off}",
            )
            groups.setdefault(features, []).append(block.name)
        return [(f"{_pattern(names, features[0])}", *features[1:]) for features, names in groups.items()]

    def __str__(self) -> str:
        config = self.config
        lines = [
            f"NA-LoRA plan: {len(self.blocks)} FFN block(s), control of the {config.apply_to},"
            f" channels ranked by {config.importance}, {config.regimes} regimes, {self.statistics} statistics"
        ]
        for name, parts, activation, width, regimes, mask, scaling in self.rows():
            lines += [
                f"  {name}",
                f"    {parts}; {activation}, {width} channels, responsive {regimes}",
                f"    mask {mask}; step scaling {scaling}",
            ]
        for reason in dict.fromkeys(self.refused.values()):
            names = [name for name, why in self.refused.items() if why == reason]
            lines.append(f"  refused: {names[0]}{f' and {len(names) - 1} more' if names[1:] else ''}: {reason}")
        if self.others:
            kinds = ", ".join(dict.fromkeys(_tail(name) for name in self.others))
            lines.append(f"  left as plain LoRA: {len(self.others)} adapter(s) outside FFN blocks ({kinds})")
        return "\n".join(lines)


def make_plan(found: Discovery, config: NALoRAConfig, kernels: str = "auto") -> Plan:
    """Settle which controls act on which block.

    Raises:
        NALoRAError: no block, or controls were asked for and none of them can act anywhere.
    """
    channels = sum(block.width for block in found.blocks)
    blocks = tuple(_plan_block(block, config, kernels, channels) for block in found.blocks)
    plan = Plan(config, blocks, found.refused, found.others)
    if not blocks:
        raise _nothing_to_control(plan)
    if (config.mask or config.scaling) and not any(each.mask or each.scaling for each in blocks):
        first = blocks[0]
        raise NALoRAError(
            first.block.name,
            found=f"no control that can act: mask off ({first.mask_off}), step scaling off ({first.scaling_off})",
            expected="an adapted gate projection for the mask, or an activation with regimes for the scaling",
            fix="add the gate projection to target_modules, or set regimes='derived' or thresholds",
        )
    return plan


def _plan_block(block: FFNBlock, config: NALoRAConfig, kernels: str, channels: int) -> BlockPlan:
    points = config.thresholds or block.activation.characteristic_points
    mask_off = scaling_off = ""
    if not config.mask:
        mask_off = "switched off"
    elif not block.gate.adapted:
        mask_off = f"{_tail(block.gate.name)} has no adapter"
    if not config.scaling:
        scaling_off = "switched off"
    elif points is None:
        scaling_off = f"{block.activation.name} has no finite regimes"
    elif config.thresholds is None and config.regimes == "paper" and block.activation.degenerate_in_paper:
        scaling_off = f"the paper calls {block.activation.name} degenerate; regimes='derived' scales it"
    # Without two points the shares are still told on either side of the hard gate at zero.
    thresholds = (points[0], points[1]) if points else (0.0, 0.0)
    engine = choose(block.activation, *block.statistics_kind, kernels=kernels, channels=channels)
    return BlockPlan(block, thresholds, mask_off, scaling_off, engine)


def _nothing_to_control(plan: Plan) -> NALoRAError:
    if plan.refused:
        name, reason = next(iter(plan.refused.items()))
        return NALoRAError(
            name,
            found=f"only adapters that cannot be controlled ({reason}), beside {len(plan.others)} others",
            expected="at least one FFN with linear gate or down projections",
            fix="adapt dense or shared-expert FFN layers by their full names (PEFT turns short names into expert"
            " parameters), or train this model with plain LoRA",
        )
    kinds = ", ".join(dict.fromkeys(_tail(name) for name in plan.others))
    return NALoRAError(
        "target_modules",
        found=f"LoRA adapters on {kinds} alone, none of them in an FFN (Linear → activation → Linear)",
        expected="an adapter on an FFN projection, the gate above all",
        fix='add the FFN projections to target_modules, or use target_modules="all-linear"; if a fused kernel'
        " replaced the FFN's forward, switch it off",
    )


def _tail(name: str) -> str:
    parts = name.split(".")
    return ".".join(parts[-2:]) if parts[-1] == "dense" and len(parts) > 1 else parts[-1]


def _rows(rows: slice) -> str:
    if rows == slice(None):
        return ""
    return f"[{rows.start}::{rows.step}]" if rows.step else f"[{rows.start}:{rows.stop}]"


def _pattern(names: list[str], pattern: str) -> str:
    """One name for a run of layers: the numbers that vary become a range."""
    numbers = [re.findall(r"\.(\d+)\b", name) for name in names]
    for column in zip(*numbers, strict=True):
        values = sorted({int(value) for value in column})
        whole = len(values) > 1 and values == list(range(values[0], values[-1] + 1))
        text = f"{values[0]}–{values[-1]}" if whole else ",".join(map(str, values))
        pattern = pattern.replace(".*", f".{text}", 1)
    return pattern
