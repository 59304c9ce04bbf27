"""Apply: multiply gradients or updates of LoRA factors, in place and without asking the host."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from nalora.control.decision import BlockGroup, Decision
from nalora.distributed.shards import local


class BlockFactors(NamedTuple):
    """What the LoRA factors of `n` blocks are multiplied by (eq. mask_apply_main and lora_only_scale)."""

    rows: Tensor  # [n, width], rows of the gate's B: mask × step scale, as far as each acts
    gate: Tensor  # [n], and so on: step scales
    up: Tensor
    down: Tensor
    shared: Tensor  # mean of gate and up, for an A that both share

    @classmethod
    @torch.no_grad()
    def of(cls, group: BlockGroup, decision: Decision, preserve_mean: bool) -> BlockFactors:
        """The factors of all blocks of a group."""
        rows = decision.mask
        if preserve_mean:
            rows = rows / rows.mean(-1, keepdim=True)
        if not group.mask_acts:
            rows = torch.ones_like(rows)
        gate, up, down = decision.scales.unbind(1)
        if group.scaling_acts:
            rows = rows * gate[:, None]
        return cls(rows, gate, up, down, (gate + up) / 2)


class Control(NamedTuple):
    """Parameters of one shape and what their gradients or updates are multiplied by, broadcast over [n, *shape].

    Of parameters that processes share (FSDP2) the shape and the factors are those of this process's part.
    """

    parameters: list[nn.Parameter]
    factors: Tensor

    def spelt_out(self, parameters: list[nn.Parameter]) -> list[Tensor]:
        """The factors of some of the parameters, each as large as its parameter.

        Written out once for all blocks, they let a foreach operation run as one kernel. Broadcast, it would launch
        one for every parameter: 192 in place of about 20 for a Llama of 32 layers.
        """
        full = self.factors.expand(-1, *local(self.parameters[0]).shape).contiguous().unbind()
        if len(parameters) == len(self.parameters):
            return list(full)
        wanted = set(parameters)
        return [each for parameter, each in zip(self.parameters, full, strict=True) if parameter in wanted]


@torch.no_grad()
def multiply_gradients(controls: list[Control]) -> None:
    """∇θ ← f ⊙ ∇θ, in the gradient's own memory."""
    for control in controls:
        learning = [each for each in control.parameters if each.grad is not None]
        if learning:
            gradients = tuple(local(each.grad) for each in learning if each.grad is not None)
            torch._foreach_mul_(gradients, tuple(control.spelt_out(learning)))


@torch.no_grad()
def snapshot(controls: list[Control]) -> dict[Tensor, Tensor]:
    """A copy of every parameter that learns, for `multiply_updates`."""
    parameters: list[Tensor] = [each for control in controls for each in control.parameters if each.requires_grad]
    now = [local(each) for each in parameters]
    copies = [torch.empty_like(each) for each in now]
    if copies:
        torch._foreach_copy_(copies, now)
    return dict(zip(parameters, copies, strict=True))


@torch.no_grad()
def multiply_updates(controls: list[Control], before: dict[Tensor, Tensor]) -> None:
    """θ ← θ_old + f ⊙ (θ_new − θ_old), in at least float32; exact where f = 1."""
    for control in controls:
        learning = [each for each in control.parameters if each in before]
        if not learning:
            continue
        dtype = torch.promote_types(learning[0].dtype, torch.float32)
        moved = [before[each].to(dtype) for each in learning]
        factors = [each.to(dtype) for each in control.spelt_out(learning)]
        now = [local(each) for each in learning]
        torch._foreach_lerp_(moved, [each.to(dtype) for each in now], factors)
        torch._foreach_copy_(now, moved)
