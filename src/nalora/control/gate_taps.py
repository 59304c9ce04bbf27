"""The places in a module of experts where the outputs of their gates pass by while they are computed."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any, Protocol

from torch import Tensor, nn

from nalora.kernels.inert_hook import inert_hook

# Called with a tensor and whether it holds the outputs of gate and up (True) or the gate's alone, z (False).
See = Callable[[Tensor, bool], None]


class Tap(Protocol):
    """What can be removed from a module again."""

    def remove(self) -> None:
        """Restore the module."""


def tap(experts: nn.Module, see: See) -> list[Tap]:
    """Call `see` with the gates' outputs of every expert, in the order in which they are computed.

    Grouped and batched products call `_apply_gate` once for all experts, and so does gpt-oss for each expert. The eager
    implementation of other classes calls the activation for each expert.
    """
    call = _GateCall(experts, see)
    vars(experts)["_apply_gate"] = call
    taps: list[Tap] = [call]
    activation = getattr(experts, "act_fn", None)
    if isinstance(activation, nn.Module):
        taps.append(activation.register_forward_pre_hook(_ActivationHook(call)))
    return taps


def is_tapped(module: nn.Module) -> bool:
    """Return whether the gates of these experts are observed."""
    return isinstance(vars(module).get("_apply_gate"), _GateCall)


class _GateCall:
    """Replaces a module's `_apply_gate`; a deep copy or a pickle of the module gets the method itself."""

    def __init__(self, experts: nn.Module, see: See) -> None:
        self.experts, self.see, self.running = experts, see, False

    def __call__(self, gate_up: Tensor) -> Tensor:
        self.see(gate_up, True)
        self.running = True
        try:
            result: Tensor = _method(self.experts)(gate_up)
        finally:
            self.running = False
        return result

    def remove(self) -> None:
        """Restore the method."""
        vars(self.experts).pop("_apply_gate", None)

    def __reduce__(self) -> tuple[Any, ...]:
        return _method, (self.experts,)


def _method(experts: nn.Module) -> Callable[[Tensor], Tensor]:
    kind: Any = type(experts)
    return MethodType(kind._apply_gate, experts)


class _ActivationHook:
    """The hook on the activation, for calls outside of `_apply_gate`; a copy of the module gets an inert one."""

    def __init__(self, call: _GateCall) -> None:
        self.call = call

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not self.call.running:
            self.call.see(args[0], False)

    def __reduce__(self) -> tuple[Any, ...]:
        return inert_hook, ()
