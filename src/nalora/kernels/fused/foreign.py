"""Code of others on modules, which a fused function would not call: hooks, and forwards that were replaced."""

from __future__ import annotations

from collections.abc import Iterator
from types import MethodType
from typing import Any

from torch import nn

from nalora.kernels.fused.replaced_forward import forward_below
from nalora.kernels.inert_hook import inert_hook

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class ServedHook:
    """A hook whose work a fused function does itself."""


def replaced_forward(module: nn.Module) -> str:
    """Return what replaced the forward of this one module; empty without it, or if only a fused function did."""
    if "_hf_hook" in vars(module):
        return "accelerate's hook (offloading)"
    return "a forward that other code replaced" if forward_below(module) is not None else ""


def replaced_host_forward(host: nn.Module) -> str:
    """Return the same for the module of an FFN, where a method is allowed: the replica ran it too (Liger's kernels)."""
    forward: Any = forward_below(host)
    if isinstance(forward, MethodType) and forward.__self__ is host:
        return "accelerate's hook (offloading)" if "_hf_hook" in vars(host) else ""
    return replaced_forward(host)


def hooks_of(module: nn.Module) -> str:
    """Return which hooks a call of the module runs besides those of NA-LoRA; empty if none."""
    hooks = [hook for kind in HOOKS for hook in getattr(module, kind).values()]
    foreign = [hook for hook in hooks if not isinstance(hook, ServedHook) and hook is not inert_hook()]
    return f"a hook ({getattr(foreign[0], '__name__', type(foreign[0]).__name__)})" if foreign else ""


def code_inside(layer: nn.Module) -> str:
    """Return the code of others inside a LoRA layer, on its base layer, A, B and dropout; empty if none."""
    for name, module in layer.named_modules():
        if module is layer:
            continue
        moves_inputs_only = getattr(vars(module).get("_hf_hook"), "offload", None) is False
        if found := hooks_of(module) or ("" if moves_inputs_only else replaced_forward(module)):
            return f"{found} on its {name}"
    return ""


def code_in_ffn(host: nn.Module) -> Iterator[str]:
    """Yield the code of others on the modules inside an FFN, those inside its LoRA layers excepted."""
    for name, module in host.named_modules():
        if module is not host and (found := hooks_of(module)):
            yield f"{found} on {name}"
