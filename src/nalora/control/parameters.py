"""Which LoRA parameters a block's controls act on, arranged so that all of one kind are controlled at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from peft.tuners.lora.layer import LoraLayer
from torch import Tensor, nn

from nalora.control.apply import BlockFactors, Control
from nalora.control.decision import BlockGroup, Decision
from nalora.control.plan import BlockPlan
from nalora.distributed.shards import is_sharded, local, own_rows


class Adapter(NamedTuple):
    """An adapter of a layer, by PEFT's name for it."""

    name: str
    a: nn.Parameter
    b: nn.Parameter


def active_adapters(layer: nn.Module) -> Iterator[Adapter]:
    """The adapters of the layer that a forward pass goes through, as its modules hold them at this moment."""
    if isinstance(layer, LoraLayer):
        for name in layer.active_adapters:
            if name in layer.lora_A:
                yield Adapter(name, layer.lora_A[name].weight, layer.lora_B[name].weight)


class Part(NamedTuple):
    """What a parameter is to its block: a field of `BlockFactors`, or for ``"both"`` the rows of gate and up."""

    factor: str
    gate_rows: slice
    up_rows: slice | None


def parts(plan: BlockPlan) -> Iterator[tuple[nn.Parameter, Part]]:
    """The parameters that the block's controls act on, each with its part."""
    gate, up, down = plan.block.gate, plan.block.up, plan.block.down
    everything = slice(None)
    for _, a, b in active_adapters(gate.module):
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
                for _, a, b in active_adapters(projection.module):
                    for parameter in (a, b):
                        yield parameter, Part(factor, everything, None)


class _Alike(NamedTuple):
    """Parameters of one part and shape, and the blocks of the group they belong to; None: all of them, in order.

    `rows` are those that this process holds, where it shares the parameters with others.
    """

    part: Part
    rows: slice
    parameters: list[nn.Parameter]
    blocks: Tensor | None

    def control(self, factors: BlockFactors) -> Control:
        if self.blocks is not None:
            factors = BlockFactors(*(each[self.blocks] for each in factors))
        number, dimensions = len(self.parameters), self.parameters[0].dim()
        if self.part.factor == "both":
            values = factors.gate.new_ones(number, self.parameters[0].shape[0])  # of all processes' rows
            values[:, self.part.gate_rows] = factors.rows
            if self.part.up_rows is not None:
                values[:, self.part.up_rows] = factors.up[:, None]
        else:
            values = getattr(factors, self.part.factor)
        if values.dim() > 1:
            values = values[:, self.rows]
        return Control(self.parameters, values.view(*values.shape, *(1,) * (1 + dimensions - values.dim())))


class ControlledParameters:
    """The controlled parameters of all groups, arranged anew only when adapters came, went or changed places."""

    def __init__(self, plans: tuple[BlockPlan, ...], groups: list[BlockGroup]) -> None:
        self._plans = {plan.block.name: plan for plan in plans}
        self._layers = list(dict.fromkeys(p.module for plan in plans for p in plan.block.projections.values()))
        self._groups = groups
        self._known: dict[nn.Module, list[Adapter]] = {}
        self._arranged: list[list[_Alike]] = [[] for _ in groups]

    def refresh(self) -> bool:
        """Look at the active adapters; whether anything changed."""
        now = {layer: list(active_adapters(layer)) for layer in self._layers}
        if now.keys() == self._known.keys() and all(_same(now[layer], self._known[layer]) for layer in now):
            return False
        self._known = now
        self._arranged = [self._arrange(group) for group in self._groups]
        return True

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """All parameters of the blocks' layers, the frozen ones too, as they are now."""
        for plan in self._plans.values():
            for projection in plan.block.projections.values():
                for name, parameter in projection.module.named_parameters():
                    yield f"{projection.name}.{name}", parameter

    def trained(self, layer: nn.Module) -> list[nn.Parameter]:
        """The B of the layer's adapters that the optimizer steps.

        While FSDP2 computes with a layer its modules hold other parameters, gathered for the moment.
        """
        return [adapter.b for adapter in self._known.get(layer, [])]

    def version(self, layer: nn.Module) -> int:
        """A number that grows whenever the layer's adapters are written to."""
        return sum(b._version for b in self.trained(layer))

    def were_replaced(self, layer: LoraLayer) -> bool:
        """Whether the layer computes with other parameters than those that were looked at."""
        return any(
            each.name in layer.lora_B and layer.lora_B[each.name].weight is not each.b and not is_sharded(each.b)
            for each in self._known.get(layer, [])
        )

    def _arrange(self, group: BlockGroup) -> list[_Alike]:
        found: dict[tuple[object, ...], tuple[Part, slice, list[nn.Parameter], list[int]]] = {}
        for index, name in enumerate(group.names):
            if not (group.mask_acts or group.scaling_acts):
                break
            for parameter, part in parts(self._plans[name]):
                # A slice has no hash before Python 3.12.
                own = own_rows(parameter)
                kind = (repr(part), repr(own), local(parameter).shape, parameter.dtype, parameter.device)
                *_, parameters, blocks = found.setdefault(kind, (part, own, [], []))
                parameters.append(parameter)
                blocks.append(index)
        everyone = list(range(len(group.names)))
        return [
            _Alike(
                part, own, parameters, None if blocks == everyone else group.mask.new_tensor(blocks, dtype=torch.long)
            )
            for part, own, parameters, blocks in found.values()
        ]

    def controls(self, decisions: list[Decision], preserve_mean: bool) -> list[Control]:
        """What the decisions mean for the parameters."""
        result: list[Control] = []
        for group, decision, arranged in zip(self._groups, decisions, self._arranged, strict=True):
            if arranged:
                factors = BlockFactors.of(group, decision, preserve_mean)
                result += [alike.control(factors) for alike in arranged]
        return result


def _same(some: list[Adapter], others: list[Adapter]) -> bool:
    if len(some) != len(others):
        return False
    return all(one.a is other.a and one.b is other.b for one, other in zip(some, others, strict=True))
