"""What graphs of layers depend on besides the arguments of a call: parameters, modules, adapters, and hooks."""

from __future__ import annotations

from itertools import chain
from typing import Any

from peft.tuners.lora.layer import LoraLayer
from torch import nn
from torch.nn.modules import module as torch_module

from nalora.kernels.fused.foreign import HOOKS, hooks_of
from nalora.kernels.fused.layer_recording import Watched, places_of
from nalora.kernels.fused.replaced_forward import replaced_by

_GLOBAL_HOOKS = [getattr(torch_module, f"_global{name}") for name in HOOKS]


class LayerState:
    """Reads the state of layers before each pass, for which it keeps the dictionaries that modules store things in.

    Attributes:
        places: of all parameters, by layer.
        watched: the parts of each layer that decide on the host.
    """

    def __init__(self, layers: list[nn.Module]) -> None:
        self.layers = layers
        self.collect()

    def collect(self) -> None:
        """Walk through the modules, which may be others than before."""
        self.places = [places_of(layer) for layer in self.layers]
        self.watched = [_watched(layer) for layer in self.layers]
        inner = [module for layer in self.layers for module in layer.modules() if module is not layer]
        self._inner, self._counted = inner, -1
        self._attributes = [vars(module) for module in inner]
        self._children = [module._modules for module in (*self.layers, *inner) if module._modules]
        self._hooks = [vars(module)[name] for module in inner for name in HOOKS]
        self._adapted = [module for module in inner if isinstance(module, LoraLayer)]

    def current(self) -> tuple[Any, ...]:
        """Return the state; constants that modules hold, such as the eps of a norm, are not part of it."""
        parameters = (module._parameters[name] for places in self.places for module, name, _ in places)
        state: list[Any] = [None if p is None else (id(p), p.data_ptr(), p.requires_grad) for p in parameters]
        state += map(id, chain.from_iterable(children.values() for children in self._children))
        state += [id(attributes.get("forward")) for attributes in self._attributes]
        state += [part.addresses() for parts in self.watched for part in parts]
        for layer in self._adapted:
            state += [layer.disable_adapters, *layer.merged_adapters, *layer.active_adapters, *layer.scaling.values()]
            state += [getattr(dropout, "p", 0.0) for dropout in layer.lora_dropout.values()]
        return tuple(state)

    def has_hooks_of_others(self) -> bool:
        """Return whether there are hooks inside the layers, or for all modules, that a replay would not call."""
        count = sum(map(len, self._hooks))
        if count != self._counted:
            self._counted, self._is_hooked = count, any(map(hooks_of, self._inner))
        return self._is_hooked or any(_GLOBAL_HOOKS)


def _watched(layer: nn.Module) -> list[Watched]:
    parts = (replaced_by(module) for module in layer.modules())
    return [part for part in parts if isinstance(part, Watched) and part.is_observed()]
