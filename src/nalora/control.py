"""Apply: multiply gradients or updates of a block's LoRA factors, in place and without asking the host."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from peft.tuners.lora.layer import LoraLayer
from torch import Tensor, nn

from nalora.decision import Decision
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


def factors(plan: BlockPlan, decision: Decision, index: int, preserve_mean: bool) -> list[Factor]:
    """What the decision means for the parameters of block `index` (eq. mask_apply_main and lora_only_scale)."""
    block = plan.block
    gate_scale, up_scale, down_scale = decision.scales[index].unbind()
    mask = decision.mask[index]
    if preserve_mean:
        mask = mask / mask.mean()

    gate_rows = mask if plan.mask else None
    if plan.scaling:
        gate_rows = gate_scale if gate_rows is None else gate_rows * gate_scale

    result: list[Factor] = []
    for a, b in lora_parameters(block.gate.module):
        if block.fused and block.up is not None:
            rows = torch.ones(b.shape[0], dtype=mask.dtype, device=mask.device)
            if gate_rows is not None:
                rows[block.gate.rows] = gate_rows
            if plan.scaling:
                rows[block.up.rows] = up_scale
                result.append(Factor(a, (gate_scale + up_scale) / 2))
            result.append(Factor(b, rows[:, None]))
        else:
            if plan.scaling:
                result.append(Factor(a, gate_scale))
            if gate_rows is not None:
                result.append(Factor(b, gate_rows[:, None] if gate_rows.ndim else gate_rows))
    if plan.scaling:
        for scale, projection in ((up_scale, block.up), (down_scale, block.down)):
            if projection is not None and projection.module is not block.gate.module:
                result += [Factor(p, scale) for pair in lora_parameters(projection.module) for p in pair]
    return [each for each in result if each.parameter.requires_grad]


@torch.no_grad()
def multiply_gradients(control: list[Factor]) -> None:
    """∇θ ← f ⊙ ∇θ, in the gradient's own memory."""
    for parameter, factor in control:
        if parameter.grad is not None:
            parameter.grad.mul_(factor)


@torch.no_grad()
def multiply_updates(control: list[Factor], before: list[Tensor]) -> None:
    """θ ← θ_old + f ⊙ (θ_new − θ_old), in at least float32; exact where f = 1."""
    for (parameter, factor), old in zip(control, before, strict=True):
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        scaled = torch.lerp(old.to(dtype), parameter.to(dtype), factor.to(dtype))
        parameter.copy_(scaled)
