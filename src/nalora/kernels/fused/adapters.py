"""PEFT's LoRA layers as fused layers need them: adapter and frozen weight, and A and B in the dtype of computation.

An adapter is stored in float32 and used in bf16. Casting it in every layer takes three launches a layer, each longer
than its work: 21 of about 130 in a Llama block. Here all adapters of a model are cast by a few launches when its
forward pass begins, and the LoRA scaling is folded into A.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from peft.tuners.lora import layer as peft_layer
from torch import Tensor, nn

from nalora.kernels.fused.frozen import DenseWeight, FrozenWeight
from nalora.kernels.inert_hook import inert_hook

_state = attrgetter("_version", "requires_grad")


class Factors(NamedTuple):
    """The adapters of layers that share an input: s·A of all of them stacked [Σ rank, in], and B of each."""

    a: Tensor
    b: tuple[Tensor, ...]


class Adapters(NamedTuple):
    """A, B and scaling of each layer as PEFT stores them."""

    a: tuple[Tensor, ...]
    b: tuple[Tensor, ...]
    scalings: tuple[float, ...]


def only_adapter(layer: nn.Module) -> tuple[Tensor, Tensor, float] | None:
    """Return (A, B, scaling) if exactly one plain adapter is active in the layer, else None."""
    if layer.disable_adapters or layer.merged_adapters:
        return None
    active = layer.active_adapters
    # nn.Module looks an attribute up in three dictionaries; torch.compile shares graphs between layers by attributes.
    read = getattr if torch.compiler.is_compiling() else _submodule
    every_a = read(layer, "lora_A")
    if len(active) != 1:
        active = [name for name in active if name in every_a]
    if len(active) != 1 or active[0] not in every_a or active[0] in layer.lora_variant:
        return None
    (name,) = active
    dropout, a, b = read(layer, "lora_dropout")[name], every_a[name], read(layer, "lora_B")[name]
    if (layer.training and getattr(dropout, "p", 0)) or b.bias is not None:
        return None
    return a.weight, b.weight, layer.scaling[name]


def _submodule(layer: nn.Module, name: str) -> Any:
    return layer._modules[name]._modules


def is_usable(base: nn.Module) -> bool:
    """Return whether a base layer is still frozen, and not offloaded to where accelerate keeps weights."""
    if torch.compiler.is_compiling():
        return not any(p.requires_grad for p in base.parameters())
    return not any(p is not None and (p.requires_grad or p.is_meta) for p in base._parameters.values())


def adapters_of(layers: tuple[nn.Module, ...]) -> Adapters | None:
    """Return the `only_adapter` of each layer, None if a layer has none."""
    adapters = [only_adapter(layer) for layer in layers]
    return None if None in adapters else Adapters(*zip(*adapters, strict=True))


def state_of(a: Sequence[Tensor], b: Sequence[Tensor]) -> tuple[Any, ...]:
    """Return what changes when a factor is changed in place or replaced, or begins or ceases to be trained."""
    return (*map(id, a), *map(id, b), *map(_state, a), *map(_state, b))


def frozen_weight(layer: nn.Module) -> FrozenWeight | None:
    """Return the weight below a LoRA layer; None if it is trainable or of an unknown type."""
    base = layer.base_layer if isinstance(layer, peft_layer.LoraLayer) else None
    if base is None or any(parameter.requires_grad for parameter in base.parameters()):
        return None
    if type(layer) is peft_layer.Linear and type(base) is nn.Linear:
        return DenseWeight(lambda dtype: base.weight.to(dtype))
    if type(layer) is peft_layer.Linear and type(base).__name__ == "FP8Linear":
        return base.frozen_weight
    # PEFT uses its plain Linear for a 4-bit layer too if transformers did not quantise the model.
    if type(layer).__name__ in ("Linear", "Linear4bit") and type(base).__name__ == "Linear4bit":
        from bitsandbytes.functional import dequantize_4bit

        return DenseWeight(lambda dtype: dequantize_4bit(base.weight.data, base.weight.quant_state).to(dtype))
    return None


def cast(groups: list[Adapters], dtype: torch.dtype) -> list[Factors]:
    """Return the factors of every group in the given dtype, row by row in memory however PEFT's are stored."""
    factors: list[Factors] = []
    if not groups:
        return factors
    for group in groups:
        rank, first = sum(a.shape[0] for a in group.a), group.a[0]
        a = torch.empty(rank, first.shape[1], dtype=dtype, device=first.device)
        factors.append(Factors(a, tuple(torch.empty(b.shape, dtype=dtype, device=b.device) for b in group.b)))
    sources = [a for group in groups for a in group.a]
    scaled = torch._foreach_mul(sources, [scaling for group in groups for scaling in group.scalings])
    ranks = [[a.shape[0] for a in group.a] for group in groups]
    targets = [rows for factor, sizes in zip(factors, ranks, strict=True) for rows in factor.a.split(sizes)]
    torch._foreach_copy_(targets, scaled)
    torch._foreach_copy_([b for factor in factors for b in factor.b], [b for group in groups for b in group.b])
    return factors


class StepFactors:
    """Casts all groups once in each forward pass of the model, when the first of them is needed.

    Outside a forward pass, when a checkpointed segment is recomputed, a group is cast alone: earlier results may be
    out of date. So is a group whose adapters changed inside the pass.
    """

    def __init__(self) -> None:
        self.groups: list[tuple[nn.Module, ...]] = []
        # Called when a pass begins or ends.
        self.on_pass: list[Callable[[], None]] = []
        self.begin_or_end(False)

    def attach(self, model: nn.Module) -> list[Callable[[], None]]:
        """Register hooks for the beginning and the end of the model's forward pass; return functions to remove them."""
        begin = model.register_forward_pre_hook(_PassHook(self, True))
        end = model.register_forward_hook(_PassHook(self, False), always_call=True)
        return [begin.remove, end.remove]

    def begin_or_end(self, in_pass: bool) -> None:
        """Note that a forward pass of the model begins or ends; results of the one before are dropped."""
        self._in_pass = in_pass
        self._dtype: torch.dtype | None = None
        # With the adapters' state when they were cast.
        self._cast: dict[tuple[nn.Module, ...], tuple[Factors, tuple[Any, ...]]] = {}
        for forget in self.on_pass:
            forget()

    @torch.no_grad()
    def get(self, layers: tuple[nn.Module, ...], adapters: Adapters, dtype: torch.dtype) -> Factors:
        """Return the factors of one group of layers."""
        if self._in_pass and self._dtype is None:
            self._dtype = dtype
            plain = {group: each for group in self.groups if (each := adapters_of(group)) is not None}
            states = [_state_with_scalings(each) for each in plain.values()]
            factors = cast([*plain.values()], dtype)
            self._cast = dict(zip(plain, zip(factors, states, strict=True), strict=True))
        if self._dtype is dtype and layers in self._cast:
            factors_of_group, state = self._cast[layers]
            if state == _state_with_scalings(adapters):
                return factors_of_group
        return cast([adapters], dtype)[0]


def _state_with_scalings(adapters: Adapters) -> tuple[Any, ...]:
    return (*state_of(adapters.a, adapters.b), adapters.scalings)


class _PassHook:
    """Marks the beginning or the end of the model's forward pass; a copy of the model gets an inert hook."""

    def __init__(self, factors: StepFactors, begins: bool) -> None:
        self.factors, self.begins = factors, begins

    def __call__(self, *_: Any) -> None:
        """Begin or end the pass."""
        self.factors.begin_or_end(self.begins)

    def __reduce__(self) -> tuple[Any, ...]:
        return inert_hook, ()
