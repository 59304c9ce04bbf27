"""Outputs of norms that fused layers do not keep: the backward pass computes them again from the norm's input.

A norm that is one function, Liger's for example, keeps its input for its own backward pass. The layers that read its
output would keep that as well: at the shapes of Llama-3.1-8B with 4 × 1,024 tokens 64 tensors of 32 MiB, 2 GiB in all.
Computing an output again reads and writes it once, and gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from nalora.kernels.fused.foreign import ServedHook
from nalora.kernels.inert_hook import inert_hook

# Below this size of an output, memory is not what limits a training, and a launch takes longer than its work.
LEAST_BYTES = 16 * 2**20

Restore = Callable[[Tensor], Tensor]


class _Origin(NamedTuple):
    """The norm's input, the versions of input and output when it ran, and what computes the output again."""

    input: TensorWeakRef
    versions: tuple[int, int]
    again: Restore


# Of outputs that are alive; none of the tensors is kept alive by its entry.
_origins = WeakTensorKeyDictionary()


def saved_form(x: Tensor, rows: Tensor) -> tuple[Tensor, Restore]:
    """Return what a fused function saves of its input, and what makes `rows` of it in the backward pass.

    Args:
        x: the input.
        rows: the input as [tokens, in], in the dtype of computation.
    """
    origin: _Origin | None = _origins.get(x)
    source: Tensor | None = origin.input() if origin is not None else None
    if origin is None or source is None or origin.versions != (source._version, x._version):
        return rows, _as_it_is
    shape, dtype, again = rows.shape, rows.dtype, origin.again
    return source.detach(), lambda saved: again(saved).reshape(shape).to(dtype)


def recompute_norm_outputs(model: nn.Module, widths: set[int]) -> list[Callable[[], None]]:
    """Let fused layers compute the outputs of norms with these widths again; return functions that undo it."""
    norms = [module for module in model.modules() if _width(module) in widths]
    return [norm.register_forward_hook(_NotesOrigin()).remove for norm in norms]


def _as_it_is(rows: Tensor) -> Tensor:
    return rows


def _width(module: nn.Module) -> int | None:
    """Return the number of features of a norm whose output depends on its input and its weights alone, else None."""
    is_norm = type(module).__name__.endswith("Norm") and not isinstance(module, nn.modules.batchnorm._NormBase)
    sizes = {parameter.shape for parameter in module._parameters.values() if parameter is not None}
    if not is_norm or module._modules or len(sizes) != 1:
        return None
    (shape,) = sizes
    return shape[0] if len(shape) == 1 else None


class _NotesOrigin(ServedHook):
    """A hook on a norm that notes how its output can be computed again; a copy of the norm gets an inert one."""

    def __init__(self) -> None:
        self.keeps: dict[tuple[Any, ...], bool] = {}

    def __call__(self, norm: nn.Module, args: tuple[Any, ...], y: Any) -> None:
        """Note the origin of an output in a training pass."""
        if torch.compiler.is_compiling() or not isinstance(y, Tensor) or not y.requires_grad or len(args) != 1:
            return
        (x,) = args
        if y.nbytes >= LEAST_BYTES and x.requires_grad and self.keeps_input(norm, x):
            _origins[y] = _Origin(TensorWeakRef(x), (x._version, y._version), _as_now(norm, x.device.type))

    def keeps_input(self, norm: nn.Module, x: Tensor) -> bool:
        """Return whether the norm keeps its input in any case, and its weights are the same in the backward pass."""
        if any(p is not None and p.requires_grad for p in norm._parameters.values()):
            return False
        # Other kernels may be put in place of the norm's own at any time.
        state = x.dtype, torch.is_autocast_enabled(x.device.type), getattr(norm.forward, "__func__", None)
        if state not in self.keeps:
            self.keeps[state] = _keeps(norm, x)
        return self.keeps[state]

    def __reduce__(self) -> tuple[Any, ...]:
        return inert_hook, ()


def _keeps(norm: nn.Module, x: Tensor) -> bool:
    """Return whether autograd keeps the norm's input, by a pass with one row like those of x."""
    row = torch.zeros_like(x[(0,) * (x.dim() - 1)][None], requires_grad=True)
    kept: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        kept.append(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, _as_it_is):
        norm.forward(row)
    return row.data_ptr() in kept


def _as_now(norm: nn.Module, device: str) -> Restore:
    """Return a function that computes the norm as it is computed now: backward passes run outside of autocast."""
    cast_to = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None

    def again(x: Tensor) -> Tensor:
        with torch.no_grad(), nullcontext() if cast_to is None else torch.autocast(device, cast_to):
            y: Tensor = norm.forward(x)
        return y

    return again
