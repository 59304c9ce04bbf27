"""The LoRA parameters that the controls of a block act on, grouped so that one operation covers those of one kind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from nalora.control.apply import BlockFactors, Control, factors_of_experts
from nalora.control.decision import BlockGroup, Decision
from nalora.control.peft_layers import Adapter, active_adapters, all_adapters
from nalora.control.plan import BlockPlan, Plan
from nalora.distributed.shards import is_sharded, local, own_rows


class Role(NamedTuple):
    """The factor of a parameter: a field of `BlockFactors`, or for ``"both"`` those of gate and up in their rows.

    ``"columns"`` is the role of GraLoRA's A in a layer with the rows of gate and up: some of its columns reach one of
    them alone. `channels` is the number of the layer's outputs, `blocks` that of `Adapter`.
    """

    factor: str
    gate_rows: slice = slice(None)
    up_rows: slice | None = None
    channels: int = 0
    blocks: int = 0


def controlled(plan: BlockPlan) -> Iterator[tuple[nn.Parameter, Role]]:
    """Yield the parameters that the block's controls act on, with their roles."""
    gate, up, down = plan.block.gate, plan.block.up, plan.block.down
    for adapter in active_adapters(gate.module):
        layout = adapter.channels, adapter.blocks
        fused = plan.block.fused and up is not None
        up_rows = up.rows if plan.scaling and up else None
        if plan.scaling:
            shared = Role("columns", gate.rows, up_rows, *layout) if adapter.blocks else Role("shared")
            yield adapter.a, shared if fused else Role("gate")
        yield adapter.b, Role("both" if fused else "rows", gate.rows, up_rows if fused else None, *layout)
    for factor, projection in (("up", up), ("down", down)) if plan.scaling else ():
        if projection is not None and projection.module is not gate.module:
            for adapter in active_adapters(projection.module):
                yield from ((adapter.a, Role(factor)), (adapter.b, Role(factor)))


def controlled_parameters(plan: Plan) -> list[nn.Parameter]:
    """Return all parameters that the controls of a plan act on."""
    return [parameter for planned in plan.blocks for parameter, _ in controlled(planned)]


class _Batch(NamedTuple):
    """Parameters of one role and shape, and the indices of their blocks in the group; None: all of them, in order.

    `rows` are the rows that this process holds of sharded parameters. For the adapters of experts, `experts` is their
    number and `is_b` whether the parameters are B; the indices are those of all experts.
    """

    role: Role
    rows: slice
    parameters: list[nn.Parameter]
    blocks: Tensor | None
    experts: int = 0
    is_b: bool = False

    def control(self, factors: BlockFactors) -> Control:
        if self.blocks is not None:
            factors = BlockFactors(*(factor[self.blocks] for factor in factors))
        role, parameter = self.role, self.parameters[0]
        if role.factor in ("both", "columns"):
            values = factors.gate.new_ones(len(factors.gate), role.channels)  # the rows of all processes
            values[:, role.gate_rows] = factors.rows if role.factor == "both" else factors.gate[:, None]
            if role.up_rows is not None:
                values[:, role.up_rows] = factors.up[:, None]
        else:
            values = getattr(factors, role.factor)
        if role.blocks:
            values = values.reshape(len(values), role.blocks, 1, -1)
        if role.factor == "columns":
            # The mean over the channels that a column reaches, as for an A of LoRA, whose rows reach all of them.
            columns = values.mean(-1).repeat_interleave(parameter.shape[2] // role.blocks, dim=1)
            values = columns.mT[:, None].expand(-1, role.blocks, -1, -1)
        if self.experts:
            values = factors_of_experts(values, self.experts, parameter.shape, is_b=self.is_b)
        if values.dim() > 1:
            values = values[:, self.rows]
        return Control(self.parameters, values[(..., *(None,) * (1 + parameter.dim() - values.dim()))])


class ControlledParameters:
    """The controlled parameters of all groups, grouped again only when adapters were added, removed or replaced."""

    def __init__(self, plans: tuple[BlockPlan, ...], groups: list[BlockGroup]) -> None:
        self._plans = {plan.block.name: plan for plan in plans}
        self._layers = list(dict.fromkeys(p.module for plan in plans for p in plan.block.projections.values()))
        self._groups = groups
        self._known: dict[nn.Module, list[Adapter]] = {}
        self._batches: list[list[_Batch]] = [[] for _ in groups]

    def refresh(self) -> bool:
        """Update the active adapters; return whether any changed."""
        now = {layer: list(active_adapters(layer)) for layer in self._layers}
        if _identities(now) == _identities(self._known):
            return False
        self._known = now
        self._batches = [self._batches_of(group) for group in self._groups]
        return True

    def trained(self, layer: nn.Module) -> list[nn.Parameter]:
        """Return the B of the layer's adapters that the optimizer steps.

        While FSDP2 computes a layer, its modules hold other parameters, gathered temporarily.
        """
        return [adapter.b for adapter in self._known.get(layer, [])]

    def version(self, layer: nn.Module) -> int:
        """Return a number that increases whenever the layer's adapters are written to."""
        return sum(b._version for b in self.trained(layer))

    def were_replaced(self, layer: nn.Module) -> bool:
        """Return whether the layer computes with other parameters than at the last refresh."""
        adapters = list(all_adapters(layer))
        names, held = {adapter.name for adapter in adapters}, {id(adapter.b) for adapter in adapters}
        return any(
            known.name in names and id(known.b) not in held and not is_sharded(known.b)
            for known in self._known.get(layer, [])
        )

    def controls(self, decisions: list[Decision], preserve_mean: bool) -> list[Control]:
        """Return the factors of all parameters for the decisions of all groups."""
        result: list[Control] = []
        for group, decision, batches in zip(self._groups, decisions, self._batches, strict=True):
            if batches:
                factors = BlockFactors.of(group, decision, preserve_mean)
                result += [batch.control(factors) for batch in batches]
        return result

    def _batches_of(self, group: BlockGroup) -> list[_Batch]:
        if not (group.mask_acts or group.scaling_acts):
            return []
        batches: dict[tuple[object, ...], tuple[Role, slice, bool, list[nn.Parameter], list[int]]] = {}
        for index, name in enumerate(group.names):
            bs = {
                id(adapter.b) for p in self._plans[name].block.projections.values() for adapter in self._known[p.module]
            }
            for parameter, role in controlled(self._plans[name]):
                rows, is_b = own_rows(parameter), bool(group.experts) and id(parameter) in bs
                # By repr, since a slice has no hash before Python 3.12.
                kind = (repr(role), repr(rows), is_b, local(parameter).shape, parameter.dtype, parameter.device)
                *_, parameters, blocks = batches.setdefault(kind, (role, rows, is_b, [], []))
                parameters.append(parameter)
                blocks += group.indices(index)
        everyone = list(range(len(group.mask)))
        return [
            _Batch(
                role,
                rows,
                same,
                None if blocks == everyone else group.mask.new_tensor(blocks, dtype=torch.long),
                group.experts,
                is_b,
            )
            for role, rows, is_b, same, blocks in batches.values()
        ]


def _identities(adapters: dict[nn.Module, list[Adapter]]) -> dict[nn.Module, list[tuple[int, int]]]:
    return {layer: [(id(adapter.a), id(adapter.b)) for adapter in active] for layer, active in adapters.items()}
