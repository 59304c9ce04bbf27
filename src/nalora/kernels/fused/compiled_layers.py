"""Compile whole decoder layers by torch.compile, with the fused functions as operators inside.

What is left of a decoder layer besides them, norms, rotary embedding, residual additions and casts, becomes a few
kernels. All layers of a class share one compiled function. Only training passes are compiled: evaluation, generation
and calls with a key-value cache use the layer's own forward.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from peft.tuners.lora.layer import LoraLayer
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from nalora.errors import NALoRAError, missing_package
from nalora.kernels.fused.adapters import frozen_weight
from nalora.kernels.fused.foreign import hooks_of
from nalora.kernels.fused.linears_op import is_stored_in_tensors
from nalora.kernels.fused.replaced_forward import Replacement, replace_forward
from nalora.kernels.inert_hook import inert_hook
from nalora.kernels.statistics.engines import can_compile

_WHERE = "fuse(compile_layers=True)"
_WITHOUT = "call fuse(model) without compile_layers"


def decoder_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers to compile: members of the outermost lists of modules all of which have LoRA layers."""
    layers: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or any(name.startswith(f"{layer}.") for layer in layers):
            continue
        if len(module) and all(any(isinstance(m, LoraLayer) for m in layer.modules()) for layer in module):
            layers |= {f"{name}.{index}": layer for index, layer in enumerate(module)}
    return layers


def refuse_unless_compilable(model: nn.Module) -> None:
    """Raise NALoRAError for a model whose layers cannot be compiled, before anything is changed."""
    layers = decoder_layers(model)
    if not layers:
        raise NALoRAError(
            _WHERE,
            found=f"{type(model).__name__} without a list of layers that have LoRA adapters",
            expected="decoder layers in a torch.nn.ModuleList",
            fix="leave compile_layers out",
        )
    for name, layer in layers.items():
        for inner, module in layer.named_modules():
            where = f"{name}.{inner}"
            base = module.base_layer if isinstance(module, LoraLayer) else None
            if base is not None and frozen_weight(module) is not None and not is_stored_in_tensors(base):
                found, fix = f"a weight in 4 bits ({type(base).__name__})", "leave compile_layers out"
                raise NALoRAError(where, found=found, expected="a weight in its own precision or FP8", fix=fix)
            if hook := hooks_of(module):
                fix = "remove it before, or leave compile_layers out"
                raise NALoRAError(where, found=hook, expected="layers without hooks", fix=fix)
    device = next(model.parameters()).device
    if not can_compile(device):
        if device.type == "cuda":
            raise missing_package(_WHERE, "triton", "to compile for a GPU", instead=", or leave compile_layers out")
        found, fix = f"no C++ compiler for a model on {device.type}", "install g++, or leave compile_layers out"
        raise NALoRAError(_WHERE, found=found, expected="a GPU, or a CPU and a compiler", fix=fix)


def compile_layers(model: nn.Module) -> list[Callable[[], None]]:
    """Compile the decoder layers of a model when they are first used; return functions that undo it."""
    compiled: dict[type[nn.Module], Callable[..., Any]] = {}
    undo = []
    for name, layer in decoder_layers(model).items():
        kind = type(layer)
        if kind not in compiled:
            compiled[kind] = _compiled(_own_forward(kind))
        undo.append(replace_forward(layer, _CompiledLayer(name, compiled[kind], _checkpoints_in_forward(kind))))
    return undo + without_cache(model)


def without_cache(model: nn.Module) -> list[Callable[[], None]]:
    """Let training passes run without a key-value cache; return functions that undo it."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    if "use_cache" not in inspect.signature(inner.forward).parameters:
        return []
    return [model.register_forward_pre_hook(_WithoutCache(), with_kwargs=True).remove]


class _WithoutCache:
    """Leaves the key-value cache out of training passes, which do not read it; a layer would be compiled for its index.

    A copy of the model gets an inert hook.
    """

    def __call__(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        if model.training and torch.is_grad_enabled():
            return args, {"use_cache": False} | kwargs
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return inert_hook, ()


def _checkpoints_in_forward(kind: type[nn.Module]) -> bool:
    """Return whether the class's forward itself applies gradient checkpointing; up to transformers 5.17 a call does."""
    return issubclass(kind, GradientCheckpointingLayer) and "__call__" not in vars(GradientCheckpointingLayer)


def _own_forward(kind: type[nn.Module]) -> Callable[..., Any]:
    """Return the forward of a class without gradient checkpointing, inside which the layer is compiled."""
    forward: Callable[..., Any] = kind.forward
    return getattr(forward, "__wrapped__", forward) if _checkpoints_in_forward(kind) else forward


def _compiled(forward: Callable[..., Any]) -> Callable[..., Any]:
    # torch counts compilations by code object and gives up at 8; a copy is not counted with other models' layers.
    copy = types.FunctionType(
        forward.__code__.replace(), forward.__globals__, forward.__name__, forward.__defaults__, forward.__closure__
    )
    copy.__kwdefaults__ = forward.__kwdefaults__
    compiled: Callable[..., Any] = torch.compile(copy, fullgraph=True, backend=_inductor)
    return compiled


def _inductor(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """Compile a graph by Inductor; the outputs of norms are computed again in the backward pass, not kept for it.

    By default nothing is computed again that an operator reads in the backward pass, as fused functions read them.
    """
    with torch._functorch.config.patch(ban_recompute_materialized_backward=False):
        compiled: Callable[..., Any] = torch._dynamo.lookup_backend("inductor")(graph, inputs)
    return compiled


class _CompiledLayer(Replacement):
    """Computes one decoder layer: training passes by the function that all layers of its class share."""

    def __init__(self, name: str, compiled: Callable[..., Any], checkpoints: bool) -> None:
        self.name, self.compiled, self.checkpoints = name, compiled, checkpoints

    def compute(self, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Return the output."""
        cached = kwargs.get("past_key_values") is not None or kwargs.get("use_cache")
        if not layer.training or not torch.is_grad_enabled() or cached:
            return self.original(layer, *args, **kwargs)
        try:
            if self.checkpoints and layer.gradient_checkpointing:
                return layer._gradient_checkpointing_func(functools.partial(self.compiled, layer, **kwargs), *args)
            return self.compiled(layer, *args, **kwargs)
        except torch._dynamo.exc.FailOnRecompileLimitHit as error:  # not one of those below
            raise NALoRAError(
                self.name,
                found=f"a layer for which torch.compile is at its limit, {torch._dynamo.config.recompile_limit} graphs",
                expected="adapters whose ranks and scalings are those of all layers and do not change",
                fix=_WITHOUT,
            ) from error
        except torch._dynamo.exc.TorchDynamoException as error:
            raise NALoRAError(
                self.name,
                found=f"a layer that cannot be compiled as a whole: {str(error).splitlines()[0]}",
                expected="a forward without branches that depend on data",
                fix=_WITHOUT,
            ) from error
