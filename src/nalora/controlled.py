"""Which LoRA parameters a block's controls act on, arranged so that all of one kind are controlled at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from peft.tuners.lora.layer import LoraLayer
from torch import Tensor, nn

from nalora.control import BlockFactors, Control
from nalora.decision import BlockGroup, Decision
from nalora.plan import BlockPlan


def lora_parameters(layer: nn.Module) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
    """(A, B) of every active adapter of the layer."""
    if isinstance(layer, LoraLayer):
        for adapter in layer.active_adapters:
            if adapter in layer.lora_A:
                yield layer.lora_A[adapter].weight, layer.lora_B[adapter].weight


class Part(NamedTuple):
    """What a parameter is to its block: a field of `BlockFactors`, or for ``"both"`` the rows of gate and up."""

    factor: str
    gate_rows: slice
    up_rows: slice | None


def parts(plan: BlockPlan) -> Iterator[tuple[nn.Parameter, Part]]:
    """The parameters that the block's controls act on, each with its part."""
    gate, up, down = plan.block.gate, plan.block.up, plan.block.down
    everything = slice(None)
    for a, b in lora_parameters(gate.module):
        if plan.block.fused and up is not None:
            if plan.scaling:
                yield a, Part("shared", everything, None)
            yield b, Part("both", gate.rows, up.rows if plan.scaling else None)
        else:
            if plan.scaling:
                yield a, Part("gate", everything, None)
            yield b, Part("rows", everything, None)
    if plan.scaling:
        for factor, projection in (("up", up), ("down", down)):
            if projection is not None and projection.module is not gate.module:
                for pair in lora_parameters(projection.module):
                    for parameter in pair:
                        yield parameter, Part(factor, everything, None)


class _Alike(NamedTuple):
    """Parameters of one part and shape, and the blocks of the group they belong to; None: all of them, in order."""

    part: Part
    parameters: list[nn.Parameter]
    blocks: Tensor | None

    def control(self, factors: BlockFactors) -> Control:
        if self.blocks is not None:
            factors = BlockFactors(*(each[self.blocks] for each in factors))
        number, dimensions = len(self.parameters), self.parameters[0].dim()
        if self.part.factor == "both":
            values = factors.gate.new_ones(number, self.parameters[0].shape[0])
            values[:, self.part.gate_rows] = factors.rows
            if self.part.up_rows is not None:
                values[:, self.part.up_rows] = factors.up[:, None]
        else:
            values = getattr(factors, self.part.factor)
        return Control(self.parameters, values.view(*values.shape, *(1,) * (1 + dimensions - values.dim())))


class ControlledParameters:
    """The controlled parameters of all groups, arranged anew only when adapters came, went or changed places."""

    def __init__(self, plans: tuple[BlockPlan, ...], groups: list[BlockGroup]) -> None:
        self._plans = {plan.block.name: plan for plan in plans}
        self._layers = list(dict.fromkeys(p.module for plan in plans for p in plan.block.projections.values()))
        self._groups = groups
        self._known: list[nn.Parameter] = []
        self._arranged: list[list[_Alike]] = [[] for _ in groups]

    def refresh(self) -> bool:
        """Look at the active adapters; whether anything changed."""
        now = [each for layer in self._layers for pair in lora_parameters(layer) for each in pair]
        if len(now) == len(self._known) and all(a is b for a, b in zip(now, self._known, strict=True)):
            return False
        self._known = now
        self._arranged = [self._arrange(group) for group in self._groups]
        return True

    def _arrange(self, group: BlockGroup) -> list[_Alike]:
        found: dict[tuple[object, ...], tuple[Part, list[nn.Parameter], list[int]]] = {}
        for index, name in enumerate(group.names):
            if not (group.mask_acts or group.scaling_acts):
                break
            for parameter, part in parts(self._plans[name]):
                # A slice has no hash before Python 3.12.
                kind = (repr(part), parameter.shape, parameter.dtype, parameter.device)
                _, parameters, blocks = found.setdefault(kind, (part, [], []))
                parameters.append(parameter)
                blocks.append(index)
        everyone = list(range(len(group.names)))
        return [
            _Alike(part, parameters, None if blocks == everyone else torch.tensor(blocks, device=group.mask.device))
            for part, parameters, blocks in found.values()
        ]

    def controls(self, decisions: list[Decision], preserve_mean: bool) -> list[Control]:
        """What the decisions mean for the parameters."""
        result: list[Control] = []
        for group, decision, arranged in zip(self._groups, decisions, self._arranged, strict=True):
            if arranged:
                factors = BlockFactors.of(group, decision, preserve_mean)
                result += [alike.control(factors) for alike in arranged]
        return result
