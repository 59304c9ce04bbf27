"""The plan: every FFN block of a model, the controls that act on it, and the reasons why others do not."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import nn

from nalora.config import NALoRAConfig
from nalora.control.blocks import Discovery, FFNBlock, Projection
from nalora.errors import NALoRAError, counted
from nalora.kernels.statistics import Engine, choose
from nalora.models.peft_names import in_base

SWITCHED_OFF = "switched off"


@dataclass(frozen=True)
class BlockPlan:
    """The controls of one block; `mask_off` and `scaling_off` are reasons, empty where the control acts."""

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
    """All blocks in model order, adapters that cannot be controlled with the reason, and adapters outside FFNs.

    `passed_over` are FFN layers without an adapter in a model where PEFT takes their names for expert parameters.
    `notice` is a sentence about the optimizer that the controller is bound to.
    """

    config: NALoRAConfig
    blocks: tuple[BlockPlan, ...]
    refused: dict[str, str]
    others: tuple[str, ...]
    passed_over: tuple[str, ...] = ()
    notice: str = ""

    @property
    def statistics(self) -> str:
        """The names of the engines that compute the blocks' statistics."""
        return ", ".join(dict.fromkeys(planned.engine.name for planned in self.blocks))

    @property
    def projections(self) -> list[Projection]:
        """The projections of all blocks."""
        return [projection for planned in self.blocks for projection in planned.block.projections.values()]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield all current parameters of the blocks' layers, frozen ones included."""
        for projection in self.projections:
            yield from projection.module.named_parameters(prefix=projection.name)

    def rows(self) -> list[tuple[str, ...]]:
        """Return one row per kind of block: name, layers, activation, width, regimes, mask, scaling."""
        groups: dict[tuple[str, ...], list[str]] = {}
        for planned in self.blocks:
            block = planned.block
            parts = ", ".join(
                f"{role} {_tail(p.name)}{_rows(p.rows)}{'' if p.adapted else ' (no adapter)'}"
                for role, p in block.projections.items()
            )
            parts += f", in each of {block.experts.number} experts" if block.experts else ""
            lower, upper = planned.thresholds
            features = (
                re.sub(r"\.\d+\b", ".*", block.name),
                parts,
                block.activation.name,
                str(block.width),
                f"{lower:+.3f} … {upper:+.3f}" if lower < upper else "–",
                "on" if planned.mask else f"off: {planned.mask_off}",
                "on" if planned.scaling else f"off: {planned.scaling_off}",
            )
            groups.setdefault(features, []).append(block.name)
        return [(_pattern(names, features[0]), *features[1:]) for features, names in groups.items()]

    def __str__(self) -> str:
        config = self.config
        lines = [
            f"NA-LoRA plan: {len(self.blocks)} FFN block(s), control of the {config.apply_to},"
            f" channels ranked by {config.importance}, {config.regimes} regimes, {self.statistics} statistics"
        ]
        if chosen := config.chosen():
            settings = ", ".join(f"{name}={value}" for name, value in chosen.items())
            lines.append(f"  settings other than the defaults: {settings}")
        for name, parts, activation, width, regimes, mask, scaling in self.rows():
            lines += [
                f"  {name}",
                f"    {parts}; {activation}, {width} channels, responsive {regimes}",
                f"    mask {mask}; step scaling {scaling}",
            ]
        notices = [self.notice] if self.notice else []
        return "\n".join([*lines, *(f"  {line}" for line in (*self.uncontrolled(), *notices))])

    def uncontrolled(self) -> list[str]:
        """Return a line for each kind of layer that is not controlled: refused, outside FFNs, without an adapter."""
        lines = []
        for reason in dict.fromkeys(self.refused.values()):
            names = [in_base(name) for name, why in self.refused.items() if why == reason]
            lines.append(f"refused: {names[0]}{f' and {len(names) - 1} more' if names[1:] else ''}: {reason}")
        if self.others:
            kinds = ", ".join(dict.fromkeys(_tail(name) for name in self.others))
            lines.append(f"left as plain LoRA: {counted(len(self.others), 'adapter')} outside FFN blocks ({kinds})")
        if self.passed_over:
            lines.append(f"without an adapter: {', '.join(self.passed_over)}; {how_to_adapt(self.passed_over)}")
        return lines


def make_plan(found: Discovery, config: NALoRAConfig, kernels: str = "auto") -> Plan:
    """Determine which controls act on which block.

    Raises:
        NALoRAError: no block, or controls are switched on and none of them can act on any block.
    """
    channels = sum(block.width for block in found.blocks if not block.experts)
    blocks = tuple(_plan_block(block, config, kernels, channels) for block in found.blocks)
    if not blocks:
        raise _nothing_to_control(found)
    if (config.mask or config.scaling) and not any(planned.mask or planned.scaling for planned in blocks):
        first = blocks[0]
        raise NALoRAError(
            first.block.name,
            found=f"no control that can act: mask off ({first.mask_off}), step scaling off ({first.scaling_off})",
            expected="an adapted gate projection for the mask, or an activation with regimes for the scaling",
            fix=_how_to_act(first, config, found.rewrites),
        )
    return Plan(config, blocks, found.refused, found.others, found.bare if found.rewrites else ())


def _how_to_act(plan: BlockPlan, config: NALoRAConfig, rewrites: bool) -> str:
    """Return the settings that switch a control on for a block without one."""
    gate = in_base(plan.block.gate.name)
    fixes = []
    if config.mask:
        fixes.append(how_to_adapt([gate]) if rewrites else f"add {_tail(gate)} to target_modules")
    elif plan.block.gate.adapted:
        fixes.append("set mask=True")
    if config.scaling:
        bounded = plan.block.activation.characteristic_points is not None
        fixes.append("set regimes='derived'" if bounded else "give NALoRAConfig thresholds=(low, high)")
    elif not _plan_block(plan.block, replace(config, scaling=True), "off", plan.block.width).scaling_off:
        fixes.append("set scaling=True")
    return ", or ".join(fixes)


def _plan_block(block: FFNBlock, config: NALoRAConfig, kernels: str, channels: int) -> BlockPlan:
    points = config.thresholds or block.activation.characteristic_points
    mask_off = "" if block.gate.adapted else f"{_tail(block.gate.name)} has no adapter"
    if not config.mask:
        mask_off = SWITCHED_OFF
    scaling_off = why_not_scaled(
        block.activation.name,
        has_regimes=points is not None,
        degenerate=config.thresholds is None and block.activation.degenerate_in_paper,
        switched_on=config.scaling,
        regimes=config.regimes,
    )
    # Without two points, the shares are those on either side of the hard gate at zero.
    thresholds = (points[0], points[1]) if points else (0.0, 0.0)
    # The tokens of one expert are few, for which compiled kernels do not pay off; see `kernels.statistics.by_expert`.
    kernels = "off" if block.experts else kernels
    engine = choose(block.activation, *block.statistics_kind, kernels=kernels, channels=channels)
    return BlockPlan(block, thresholds, mask_off, scaling_off, engine)


def why_not_scaled(activation: str, *, has_regimes: bool, degenerate: bool, switched_on: bool, regimes: str) -> str:
    """Return why step scaling does not act on a block with this activation; empty where it acts."""
    if not switched_on:
        return SWITCHED_OFF
    if not has_regimes:
        return f"{activation} has no finite regimes"
    if degenerate and regimes == "paper":
        return f"the paper calls {activation} degenerate; regimes='derived' scales it"
    return ""


def _nothing_to_control(found: Discovery) -> NALoRAError:
    """Return the error for a model without adapters in FFNs, with the way to adapt them if there is one."""
    if found.refused:
        name, reason = next(iter(found.refused.items()))
        seen = f"only adapters that cannot be controlled ({reason}), and {len(found.others)} others"
    else:
        name, kinds = "target_modules", ", ".join(dict.fromkeys(_tail(name) for name in found.others))
        seen = f"LoRA adapters on {kinds} alone, none of them in an FFN (Linear → activation → Linear)"
    if found.bare and found.rewrites:
        seen += f"; the FFN layers {', '.join(found.bare)} have no adapter"
        fix = how_to_adapt(found.bare)
    elif found.bare:
        fix = f"add the FFN projections to target_modules: {', '.join(found.bare)}"
    elif found.experts:
        seen += "; the FFNs of this model are experts, whose parameters have no adapter"
        parameters = ", ".join(f'"{name}"' for name in found.experts)
        fix = f"set target_parameters=[{parameters}] in peft.LoraConfig (target_parameters in a run file)"
    elif found.other_experts:
        seen += f"; the FFNs of this model are experts in one parameter ({found.other_experts})"
        fix = "train this model with plain LoRA (method: lora in a run file): NA-LoRA cannot control these experts"
    else:
        seen += "; no layer of this model is in an FFN of a form that nalora recognises"
        fix = (
            "train this model with plain LoRA (method: lora in a run file); if a fused kernel replaced the forward"
            " of its FFNs (Unsloth, Liger), switch it off and attach again"
        )
    return NALoRAError(name, found=seen, expected="an adapter on an FFN projection, in particular the gate", fix=fix)


def how_to_adapt(names: Sequence[str]) -> str:
    """Return how to adapt linear layers whose names PEFT takes for expert parameters."""
    parameters = ", ".join(f'"{name}.weight"' for name in names)
    return (
        f"pass target_parameters=[{parameters}] to peft.LoraConfig, because PEFT takes these layers' names in"
        " target_modules for expert parameters (in a run file of nalora target_modules does name them)"
    )


def _tail(name: str) -> str:
    parts = name.split(".")
    return ".".join(parts[-2:]) if parts[-1] == "dense" and len(parts) > 1 else parts[-1]


def _rows(rows: slice) -> str:
    if rows == slice(None):
        return ""
    return f"[{rows.start}::{rows.step}]" if rows.step else f"[{rows.start}:{rows.stop}]"


def _pattern(names: list[str], pattern: str) -> str:
    """Return one name for layers that differ in their numbers, with ranges of numbers."""
    numbers = [re.findall(r"\.(\d+)\b", name) for name in names]
    for column in zip(*numbers, strict=True):
        values = sorted({int(value) for value in column})
        consecutive = len(values) > 1 and values == list(range(values[0], values[-1] + 1))
        text = f"{values[0]}–{values[-1]}" if consecutive else ",".join(map(str, values))
        pattern = pattern.replace(".*", f".{text}", 1)
    return pattern
