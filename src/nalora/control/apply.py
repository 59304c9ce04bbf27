"""Multiply gradients or updates of LoRA parameters by mask and step scales, in place, without GPU synchronisation."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from nalora.control.decision import BlockGroup, Decision
from nalora.distributed.shards import local


class BlockFactors(NamedTuple):
    """The factors of the LoRA parameters of `n` blocks (eq. mask_apply_main and lora_only_scale)."""

    rows: Tensor  # [n, width], rows of the gate's B: mask × step scale, as far as each acts
    gate: Tensor  # [n], like up and down: step scales
    up: Tensor
    down: Tensor
    shared: Tensor  # mean of gate and up, for an A that both share

    @classmethod
    @torch.no_grad()
    def of(cls, group: BlockGroup, decision: Decision, preserve_mean: bool) -> BlockFactors:
        """Return the factors of all blocks of a group."""
        rows = decision.mask
        if preserve_mean:
            rows = rows / rows.mean(-1, keepdim=True)
        if not group.mask_acts:
            rows = torch.ones_like(rows)
        gate, up, down = decision.scales.unbind(1)
        if group.scaling_acts:
            rows = rows * gate[:, None]
        return cls(rows, gate, up, down, (gate + up) / 2)


def factors_of_experts(values: Tensor, experts: int, shape: torch.Size, *, is_b: bool) -> Tensor:
    """Return the factors of adapters that hold all experts of a layer, [n, rows, columns or 1].

    PEFT stores A as [experts × r, in], expert by expert, and B as [out, r × experts], with one column of every expert
    next to each other.

    Args:
        values: the factors by expert, [n × experts] or [n × experts, out].
        experts: their number.
        shape: the shape of the whole parameter.
        is_b: whether the parameters are B.
    """
    by_expert = values.view(-1, experts, *(values.shape[1:] or (1,)))
    if is_b:
        return by_expert.mT.repeat(1, 1, shape[1] // experts).expand(-1, shape[0], -1)
    return by_expert.repeat_interleave(shape[0] // experts, dim=1)


class Control(NamedTuple):
    """Parameters of one shape and the factors of their gradients or updates, broadcast over [n, *shape].

    For parameters sharded by FSDP2, shape and factors are those of this process's part.
    """

    parameters: list[nn.Parameter]
    factors: Tensor

    def expanded(self, parameters: list[nn.Parameter]) -> list[Tensor]:
        """Return the factors of some of the parameters, each expanded to its parameter's shape.

        With expanded factors a foreach operation runs as one kernel. With broadcast factors it would launch one for
        every parameter: 192 in place of about 20 for a Llama with 32 layers.
        """
        full = self.factors.expand(-1, *local(self.parameters[0]).shape).contiguous().unbind()
        if len(parameters) == len(self.parameters):
            return list(full)
        selected = set(parameters)
        return [factor for parameter, factor in zip(self.parameters, full, strict=True) if parameter in selected]


@torch.no_grad()
def multiply_gradients(controls: list[Control]) -> None:
    """Compute ∇θ ← f ⊙ ∇θ, in the gradient's own memory."""
    for control in controls:
        trained = [parameter for parameter in control.parameters if parameter.grad is not None]
        if trained:
            gradients = tuple(local(parameter.grad) for parameter in trained if parameter.grad is not None)
            torch._foreach_mul_(gradients, tuple(control.expanded(trained)))


@torch.no_grad()
def snapshot(controls: list[Control]) -> dict[Tensor, Tensor]:
    """Return a copy of every trainable parameter, for `multiply_updates`."""
    parameters: list[Tensor] = [p for control in controls for p in control.parameters if p.requires_grad]
    values = [local(parameter) for parameter in parameters]
    copies = [torch.empty_like(value) for value in values]
    if copies:
        torch._foreach_copy_(copies, values)
    return dict(zip(parameters, copies, strict=True))


@torch.no_grad()
def multiply_updates(controls: list[Control], before: dict[Tensor, Tensor]) -> None:
    """Compute θ ← θ_old + f ⊙ (θ_new − θ_old), in at least float32; exact where f = 1."""
    for control in controls:
        trained = [parameter for parameter in control.parameters if parameter in before]
        if not trained:
            continue
        dtype = torch.promote_types(trained[0].dtype, torch.float32)
        result = [before[parameter].to(dtype) for parameter in trained]
        factors = [factor.to(dtype) for factor in control.expanded(trained)]
        values = [local(parameter) for parameter in trained]
        torch._foreach_lerp_(result, [value.to(dtype) for value in values], factors)
        torch._foreach_copy_(values, result)
