"""The arguments of a layer's call: what two calls have in common, and the tensors that differ between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

_CONSTANTS = (bool, int, float, str, type(None), torch.dtype)


class Call(NamedTuple):
    """Positional and keyword arguments; containers of tensors are tuples, lists and dicts."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def tensors(self) -> list[Tensor]:
        """Return the tensors, in a fixed order."""
        return [*_tensors((self.args, self.kwargs))]

    def with_tensors(self, tensors: list[Tensor]) -> Call:
        """Return the call with other tensors, in the order of `tensors`."""
        remaining = iter(tensors)
        args, kwargs = _mapped((self.args, self.kwargs), lambda _: next(remaining))
        return Call(args, kwargs)

    def kind(self) -> tuple[Any, ...] | None:
        """Return what a recording of this call depends on; None if it depends on an object that may change."""
        try:
            return _kind((self.args, self.kwargs))
        except _NotConstantError:
            return None


class _NotConstantError(Exception):
    """An argument is an object whose content may change between calls, such as a key-value cache."""


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)


def _mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple | list):
        return type(value)([_mapped(item, function) for item in value])
    if isinstance(value, dict):
        return {key: _mapped(item, function) for key, item in value.items()}
    return value


def _kind(value: Any) -> tuple[Any, ...]:
    if isinstance(value, Tensor):
        return value.shape, value.dtype, value.device, value.requires_grad
    if type(value) in (tuple, list):
        return (type(value), *(_kind(item) for item in value))
    if isinstance(value, dict):
        return (dict, *((key, _kind(item)) for key, item in value.items()))
    if isinstance(value, _CONSTANTS):
        return type(value), value
    raise _NotConstantError
