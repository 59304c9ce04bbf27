"""Define operators of torch.library by its low-level interface, a call of which takes less time than `custom_op`'s.

Their implementations trust their callers: `custom_op` compares all inputs and outputs for aliases at every call.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nalora.kernels.fused import adapters
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


def cast_in_graph(groups: Sequence[Adapters], dtype: torch.dtype) -> list[Factors]:
    """Return what `adapters.cast` returns, by one operator in a graph that torch.compile traces.

    The factors get no gradient: an operator gets the adapters too, whose gradients it returns in their own precision.
    Of an operator torch.compile keeps the results for the backward pass. The casts themselves it would compute again
    there: eleven launches for a decoder layer, each longer than its work.
    """
    a, b = ([factor.detach() for group in groups for factor in getattr(group, name)] for name in ("a", "b"))
    scalings = [scaling for group in groups for scaling in group.scalings]
    cast = iter(torch.ops.nalora.cast_adapters(a, b, scalings, [len(group.a) for group in groups], dtype))
    return [Factors(next(cast), tuple(itertools.islice(cast, len(group.b)))) for group in groups]


def _cast(
    a: Sequence[Tensor], b: Sequence[Tensor], scalings: Sequence[float], sizes: Sequence[int], dtype: torch.dtype
) -> list[Tensor]:
    """Return the stacked A, then each B, of each group; `sizes` are the groups' numbers of layers."""
    parts = zip(*(_parts(values, sizes) for values in (a, b, scalings)), strict=True)
    factors = adapters.cast([Adapters(*part) for part in parts], dtype)
    return [factor for each in factors for factor in (each.a, *each.b)]


def _shapes_of_cast(
    a: Sequence[Tensor], b: Sequence[Tensor], scalings: Sequence[float], sizes: Sequence[int], dtype: torch.dtype
) -> list[Tensor]:
    shapes: list[Tensor] = []
    for of_a, of_b in zip(_parts(a, sizes), _parts(b, sizes), strict=True):
        shapes.append(of_a[0].new_empty(sum(factor.shape[0] for factor in of_a), of_a[0].shape[1], dtype=dtype))
        shapes += [factor.new_empty(factor.shape, dtype=dtype) for factor in of_b]
    return shapes


def _parts(values: Sequence[Any], sizes: Sequence[int]) -> list[tuple[Any, ...]]:
    remaining = iter(values)
    return [tuple(itertools.islice(remaining, size)) for size in sizes]


define(
    "cast_adapters(Tensor[] a, Tensor[] b, float[] scalings, int[] sizes, ScalarType dtype) -> Tensor[]",
    _cast,
    _shapes_of_cast,
)
