"""Apply: multiply gradients or updates of a block's LoRA factors, in place and without asking the host."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from peft.tuners.lora.layer import LoraLayer
from torch import Tensor, nn

from nalora.decision import BlockGroup, Decision
from nalora.plan import BlockPlan


class Factor(NamedTuple):
    """A LoRA parameter and what its gradient or update is multiplied by, broadcast over columns."""

    parameter: nn.Parameter
    factor: Tensor


def lora_parameters(layer: nn.Module) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
    """(A, B) of every active adapter of the layer."""
    if isinstance(layer, LoraLayer):
        for adapter in layer.active_adapters:
            if adapter in layer.lora_A:
                yield layer.lora_A[adapter].weight, layer.lora_B[adapter].weight


def controlled_parameters(plan: BlockPlan) -> list[nn.Parameter]:
    """The trainable LoRA parameters that the block's controls act on."""
    gate, up, down = (plan.block.gate, plan.block.up, plan.block.down)
    layers = dict.fromkeys(p.module for p in (gate, up, down) if p is not None) if plan.scaling else {}
    pairs = [pair for layer in layers for pair in lora_parameters(layer)]
    if plan.mask and not plan.scaling:
        return [b for _, b in lora_parameters(gate.module) if b.requires_grad]
    return [p for pair in pairs for p in pair if p.requires_grad]


class BlockFactors(NamedTuple):
    """The factors of one block: rows of the gate's B, and one number each for what else is scaled."""

    gate_rows: Tensor  # [width], mask × step scale, as far as each acts
    gate: Tensor
    up: Tensor
    down: Tensor
    fused_a: Tensor  # mean of gate and up, for an A that both share


@torch.no_grad()
def factors_of_group(group: BlockGroup, decision: Decision, preserve_mean: bool) -> list[BlockFactors]:
    """The factors of all blocks of a group, computed together (eq. mask_apply_main and lora_only_scale)."""
    channels = decision.mask
    if preserve_mean:
        channels = channels / channels.mean(-1, keepdim=True)
    gate, up, down = decision.scales.unbind(1)
    rows = channels if group.mask_acts else torch.ones_like(channels)
    if group.scaling_acts:
        rows = rows * gate[:, None]
    columns = (rows, gate, up, down, (gate + up) / 2)
    return [BlockFactors(*each) for each in zip(*(column.unbind() for column in columns), strict=True)]


def factors(plan: BlockPlan, values: BlockFactors) -> list[Factor]:
    """What a block's factors mean for the parameters of its active adapters."""
    block = plan.block
    result: list[Factor] = []
    for a, b in lora_parameters(block.gate.module):
        if block.fused and block.up is not None:
            rows = torch.ones(b.shape[0], dtype=values.gate.dtype, device=values.gate.device)
            rows[block.gate.rows] = values.gate_rows
            if plan.scaling:
                rows[block.up.rows] = values.up
                result.append(Factor(a, values.fused_a))
            result.append(Factor(b, rows[:, None]))
        else:
            if plan.scaling:
                result.append(Factor(a, values.gate))
            result.append(Factor(b, values.gate_rows[:, None]))
    if plan.scaling:
        for scale, projection in ((values.up, block.up), (values.down, block.down)):
            if projection is not None and projection.module is not block.gate.module:
                result += [Factor(p, scale) for pair in lora_parameters(projection.module) for p in pair]
    return [each for each in result if each.parameter.requires_grad]


@torch.no_grad()
def multiply_gradients(control: list[Factor]) -> None:
    """∇θ ← f ⊙ ∇θ, in the gradient's own memory."""
    for alike, factors in _of_one_shape([each for each in control if each.parameter.grad is not None]):
        gradients = tuple(each.parameter.grad for each in alike if each.parameter.grad is not None)
        torch._foreach_mul_(gradients, tuple(factors))


def snapshot(control: list[Factor]) -> list[tuple[Factor, Tensor]]:
    """Each factor with a copy of its parameter, for `multiply_updates`."""
    parameters = [each.parameter.detach() for each in control]
    copies = [torch.empty_like(each) for each in parameters]
    if copies:
        torch._foreach_copy_(copies, parameters)
    return list(zip(control, copies, strict=True))


@torch.no_grad()
def multiply_updates(control: list[tuple[Factor, Tensor]]) -> None:
    """θ ← θ_old + f ⊙ (θ_new − θ_old) for each factor and its θ_old, in at least float32; exact where f = 1."""
    old: dict[Tensor, Tensor] = {each.parameter: before for each, before in control}
    for alike, factors in _of_one_shape([each for each, _ in control]):
        parameters: list[Tensor] = [each.parameter for each in alike]
        dtype = torch.promote_types(parameters[0].dtype, torch.float32)
        moved = [old[each].to(dtype) for each in parameters]
        torch._foreach_lerp_(moved, [each.to(dtype) for each in parameters], [each.to(dtype) for each in factors])
        torch._foreach_copy_(parameters, moved)


def _of_one_shape(control: list[Factor]) -> Iterator[tuple[list[Factor], list[Tensor]]]:
    """The factors in groups of one kind of parameter, each spelt out to its parameter's shape.

    Written out once for all blocks, they let a foreach operation run as one kernel. Broadcast, it would launch one for
    every parameter: 192 in place of about 20 for a Llama of 32 layers.
    """
    groups: dict[tuple[torch.Size, torch.Size, torch.dtype, torch.device], list[Factor]] = {}
    for each in control:
        kind = (each.parameter.shape, each.factor.shape, each.parameter.dtype, each.parameter.device)
        groups.setdefault(kind, []).append(each)
    for (shape, factor_shape, _, _), alike in groups.items():
        stacked = torch.stack([each.factor for each in alike])
        missing = (1,) * (len(shape) - len(factor_shape))
        full = stacked.view(len(alike), *missing, *factor_shape).expand(-1, *shape).contiguous()
        yield alike, list(full.unbind())
