"""Replace the forward of single modules, in a form that torch.compile can share between the layers of a model.

Dynamo guards on the identity of a `forward` in a module's `__dict__`, but for a bound method on its function alone. So
all modules of a class get a method of the same function, and what belongs to one module is an object in an attribute,
of which Dynamo guards on the type and on the values that it reads. An object of its own as `forward` would be compiled
again for every layer.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

from torch import nn

_ATTRIBUTE = "nalora_replacement"


class Replacement:
    """Computes the forward of one module. A deep copy or a pickle of the module has the forward of its class."""

    # Called with the module and its arguments.
    compute: Callable[..., Any]
    # The forward that the instance had and the replacement that it had, for a module that is replaced twice.
    before: Callable[..., Any] | None = None
    below: Replacement | None = None

    def original(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call the forward that is replaced."""
        if self.below is not None:
            return self.below.compute(module, *args, **kwargs)
        if self.before is not None:
            return self.before(*args, **kwargs)
        return type(module).forward(module, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy has no replacement, and its forward calls that of the class."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def replace_forward(module: nn.Module, replacement: Replacement) -> Callable[[], None]:
    """Replace the forward of this one module; return a function that restores it."""
    attributes = vars(module)
    before, below = attributes.get("forward"), attributes.get(_ATTRIBUTE)
    if below is None and getattr(before, "__func__", None) is _forward_of(type(module)):
        before = None  # a deep copy of a replaced module has the method, which would call itself
    replacement.before, replacement.below = before, below
    attributes["forward"] = MethodType(_forward_of(type(module)), module)
    attributes[_ATTRIBUTE] = replacement

    def restore() -> None:
        for name, value in (("forward", before), (_ATTRIBUTE, below)):
            attributes.pop(name, None)
            if value is not None:
                attributes[name] = value

    return restore


@contextlib.contextmanager
def all_or_nothing(model: nn.Module) -> Iterator[None]:
    """Put the forwards and hooks in a model back if the block is interrupted or fails."""
    forwards = [(vars(m), vars(m).get("forward"), vars(m).get(_ATTRIBUTE)) for m in model.modules()]
    values = (item for module in model.modules() for item in vars(module).items())
    registries = [value for name, value in values if "_hooks" in name and isinstance(value, dict)]
    hooks = [(registry, dict(registry)) for registry in registries]
    try:
        yield
    except BaseException:
        for attributes, *values in forwards:
            for name, value in zip(("forward", _ATTRIBUTE), values, strict=True):
                attributes.pop(name, None)
                if value is not None:
                    attributes[name] = value
        for registry, before in hooks:
            registry.clear()
            registry.update(before)
        raise


def replaced_by(module: nn.Module) -> Replacement | None:
    """Return what computes the module's forward in place of the forward of its class."""
    replacement: Replacement | None = vars(module).get(_ATTRIBUTE)
    return replacement


def forward_below(module: nn.Module) -> Callable[..., Any] | None:
    """Return the forward that this instance has, or had before it was replaced here; None for that of its class."""
    forward, replacement = vars(module).get("forward"), replaced_by(module)
    while replacement is not None:
        forward, replacement = replacement.before, replacement.below
    # A copy's method is one of those below, and a pickle's the one of the class.
    own = (_forward_of(type(module)), type(module).forward)
    return None if getattr(forward, "__func__", None) in own else forward


@functools.cache
def _forward_of(kind: type[nn.Module]) -> Callable[..., Any]:
    """Return the function that is `forward` in every replaced module of a class, with the signature of the class."""

    # A pickle stores a method as its name, which is looked up in the class when it is loaded.
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        replacement: Any = self.nalora_replacement
        if replacement is None:
            return type(self).forward(self, *args, **kwargs)
        return replacement.compute(self, *args, **kwargs)

    # Not `functools.wraps`: Dynamo would follow `__wrapped__`.
    vars(forward)["__signature__"] = inspect.signature(kind.forward)
    forward.__doc__ = kind.forward.__doc__
    return forward
