"""Define operators of torch.library by its low-level interface, a call of which takes less time than `custom_op`'s.

Their implementations trust their callers: `custom_op` compares all inputs and outputs for aliases at every call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from nalora.kernels.fused.adapters import Adapters, Factors

_library = torch.library.Library("nalora", "FRAGMENT")


def define(schema: str, function: Callable[..., Any], shapes: Callable[..., Any]) -> None:
    """Define `nalora::<schema>`, which calls a function; `shapes` returns its results without values."""
    name = schema[: schema.index("(")]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"nalora::{name}", shapes, lib=_library)


def differentiate(name: str, backward: Callable[..., Any], save: Callable[..., None]) -> None:
    """Give the operator `nalora::<name>` a backward and the function that saves tensors for it."""
    torch.library.register_autograd(f"nalora::{name}", backward, setup_context=save, lib=_library)


def cast_in_graph(adapters: Adapters, dtype: torch.dtype) -> Factors:
    """Return what `adapters.cast` returns, by operations of which torch.compile makes a few kernels in its graph.

    The factors get no gradient: an operator gets the adapters too, whose gradients it returns in their own precision.
    """
    scaled = [a.detach() * scaling for a, scaling in zip(adapters.a, adapters.scalings, strict=True)]
    return Factors(torch.cat(scaled).to(dtype), tuple(b.detach().to(dtype) for b in adapters.b))
