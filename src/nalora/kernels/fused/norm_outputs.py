"""Outputs of norms that fused layers do not keep: the backward pass computes them again from the norm's input.

A norm that is one function, Liger's for example, keeps its input for its own backward pass. The layers that read its
output would keep that as well: at the shapes of Llama-3.1-8B with 4 × 1,024 tokens 64 tensors of 32 MiB, 2 GiB in all.
Computing an output again reads and writes it once, and gives the same bits: it is the same function of the same input,
weights and constants, all of which are noted when the norm runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.modules import module as torch_module
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
    """Return the number of features of a module that has nothing but vectors of one size, as a norm has, else None."""
    shapes = {parameter.shape for parameter in module._parameters.values() if parameter is not None}
    if module._modules or len(shapes) != 1:
        return None
    (shape,) = shapes
    return shape[0] if len(shape) == 1 else None


class _NotesOrigin(ServedHook):
    """A hook on a norm that notes how its output can be computed again; a copy of the norm gets an inert one."""

    def __call__(self, norm: nn.Module, args: tuple[Any, ...], y: Any) -> None:
        """Note the origin of an output in a training pass, unless the output may be anything else than the norm's."""
        if torch.compiler.is_compiling() or len(args) != 1 or not isinstance(y, Tensor) or y.nbytes < LEAST_BYTES:
            return
        (x,) = args
        forward = _known_forward(norm)
        # Other hooks may change an output in ways that autograd does not see.
        hooked = len(norm._forward_hooks) > 1 or torch_module._global_forward_hooks
        if forward is None or hooked or not isinstance(x, Tensor) or not _is_one_step(x, y):
            return
        if any(p is not None and p.requires_grad for p in norm._parameters.values()):
            return
        _origins[y] = _Origin(TensorWeakRef(x), (x._version, y._version), _as_now(forward, norm, x.device.type))

    def __reduce__(self) -> tuple[Any, ...]:
        return inert_hook, ()


def _known_forward(norm: nn.Module) -> Callable[..., Tensor] | None:
    """Return the function that a norm computes, if it is known to depend on its input and attributes alone."""
    function: Any = getattr(norm.forward, "__func__", None)
    known = [nn.LayerNorm.forward, nn.RMSNorm.forward]
    if (liger := sys.modules.get("liger_kernel.transformers.rms_norm")) is not None:
        known.append(liger.LigerRMSNorm.forward)
    return function if function in known else None


def _is_one_step(x: Tensor, y: Tensor) -> bool:
    """Return whether y is x after one node of the autograd graph: unchanged since, and computed without a cast of x.

    A norm that is one node keeps its input. In place, or by a hook, y would become the output of another node.
    """
    node: Any = y.grad_fn
    return x.requires_grad and node is not None and node.next_functions[:1] == (tuple(get_gradient_edge(x))[:2],)


def _as_now(forward: Callable[..., Tensor], norm: nn.Module, device: str) -> Restore:
    """Return the function of a norm with its weights and constants as they are now, autocast included."""
    weights = {name: p if p is None else p.detach() for name, p in norm._parameters.items()}
    constants = SimpleNamespace(**{**vars(norm), **weights})
    cast_to = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None

    def again(x: Tensor) -> Tensor:
        with torch.no_grad(), nullcontext() if cast_to is None else torch.autocast(device, cast_to):
            return forward(constants, x)

    return again
