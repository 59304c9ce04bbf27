"""A and B in the dtype of computing: for all adapters of a model by a few launches, as its forward pass begins.

An adapter is held in float32 and used in bf16. Cast where it is used that is three launches a layer, each of them
longer than its work: 21 of about 130 in a Llama block. The LoRA scaling is folded into A on the way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from nalora.kernels.fused.peft_layers import only_adapter


class Factors(NamedTuple):
    """The adapters of layers that share an input: s·A of all of them stacked [Σ rank, in], and each one's B."""

    a: Tensor
    b: tuple[Tensor, ...]


class Adapters(NamedTuple):
    """The same, as PEFT holds them."""

    a: tuple[Tensor, ...]
    b: tuple[Tensor, ...]
    scalings: tuple[float, ...]


def adapters_of(layers: tuple[nn.Module, ...]) -> Adapters | None:
    """The only adapters that act on these layers, None where one of them has none or more."""
    found = [only_adapter(layer) for layer in layers]
    return None if None in found else Adapters(*zip(*found, strict=True))


def cast(groups: list[Adapters], dtype: torch.dtype) -> list[Factors]:
    """Every group's factors in another dtype."""
    made = []
    for group in groups:
        rank, first = sum(a.shape[0] for a in group.a), group.a[0]
        a = torch.empty(rank, first.shape[1], dtype=dtype, device=first.device)
        made.append(Factors(a, tuple(torch.empty_like(b, dtype=dtype) for b in group.b)))
    scaled = torch._foreach_mul(
        [a for group in groups for a in group.a], [scaling for group in groups for scaling in group.scalings]
    )
    places = [piece for each, group in zip(made, groups, strict=True) for piece in each.a.split(_ranks(group))]
    torch._foreach_copy_(places, scaled)
    torch._foreach_copy_([b for each in made for b in each.b], [b for group in groups for b in group.b])
    return made


def _ranks(group: Adapters) -> list[int]:
    return [a.shape[0] for a in group.a]


class StepFactors:
    """Casts all groups when the first of them asks, once in each forward pass of the model.

    Outside such a pass, when a checkpointed segment is computed again for one, a group is cast by itself: nothing that
    was made before is trusted to be still right.
    """

    def __init__(self) -> None:
        self.groups: list[tuple[nn.Module, ...]] = []
        self._in_pass = False
        self._dtype: torch.dtype | None = None
        self._made: dict[tuple[nn.Module, ...], Factors] = {}

    def follow(self, model: nn.Module) -> list[Callable[[], None]]:
        """Know when the model's forward pass begins and ends; what undoes it."""
        begin = model.register_forward_pre_hook(lambda *_: self._open(True))
        end = model.register_forward_hook(lambda *_: self._open(False), always_call=True)
        return [begin.remove, end.remove]

    def _open(self, in_pass: bool) -> None:
        self._in_pass, self._dtype, self._made = in_pass, None, {}

    @torch.no_grad()
    def of(self, layers: tuple[nn.Module, ...], adapters: Adapters, dtype: torch.dtype) -> Factors:
        """The factors of one group."""
        if self._in_pass and self._dtype is None:
            self._dtype = dtype
            found = {group: each for group in self.groups if (each := adapters_of(group)) is not None}
            self._made = dict(zip(found, cast([*found.values()], dtype), strict=True))
        if self._dtype is dtype and layers in self._made:
            return self._made[layers]
        return cast([adapters], dtype)[0]
