"""What the module of a gated FFN computes besides y = W_d(φ(W_g x) ⊙ (W_u x + b)), which one function would lose.

Its wiring alone does not show this: a dropout does nothing in evaluation, a clamp nothing between its bounds, and a
scale that is trained is one before the first step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from nalora.control.replica import Part, Replica
from nalora.equations import Elementwise

# Magnitudes of z and u: from 2⁻⁶ to beyond all that occurs in a model in 16 bits.
_EXPONENTS = range(-6, 17)


def what_else(
    host: nn.Module,
    replica: Replica,
    consumer: nn.Module,
    gate: Part,
    up: Part,
    phi: Elementwise,
    up_offset: float,
) -> str:
    """Return what the module computes besides, from its structure and from its replica; empty for nothing."""
    for name, module in outside_of(host, set(replica.stand_ins)):
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        if own:
            return f"an FFN with a parameter or buffer of its own ({name + '.' if name else ''}{own[0][0]})"
        if getattr(module, "p", 0) and isinstance(module, nn.modules.dropout._DropoutNd):
            return f"dropout inside the FFN ({name})"
    if _depends_on_training(replica):
        return "an FFN that computes something else in training, such as dropout"
    if not _is_product(replica, consumer, gate, up, phi, up_offset):
        return "an FFN that limits large values, or changes them otherwise"
    return ""


def outside_of(host: nn.Module, projections: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of a host by name, without its projections and what is inside those."""
    inside = {part for projection in projections for part in projection.modules()}
    for name, module in host.named_modules():
        if module not in inside:
            yield name, module


class _RandomOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes whether an operation draws random numbers from a device's own generator."""

    found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None:
            self.found = True
        return func(*args, **kwargs)


def _depends_on_training(replica: Replica) -> bool:
    """Return whether the inputs of linear layers, or the module's output, are others in training."""
    expected = replica.run({})
    random = _RandomOperations()  # type: ignore[no-untyped-call]
    modules = [*replica.module.modules()]
    devices = [replica.device] if replica.device.type == "cuda" else []
    try:
        for module in modules:
            vars(module)["training"] = True
        with torch.random.fork_rng(devices), random:
            received = replica.run({})
    except Exception:  # it needs more for a training pass than hidden states
        return True
    finally:
        for module in modules:
            vars(module)["training"] = False
    same = received.keys() == expected.keys() and all(torch.equal(received[key], expected[key]) for key in expected)
    return random.found or not same


def _is_product(
    replica: Replica, consumer: nn.Module, gate: Part, up: Part, phi: Elementwise, up_offset: float
) -> bool:
    """Return whether the consumer's input is φ(z) ⊙ (u + b) for all pairs of small and large numbers."""
    values = torch.tensor([sign * 2.0**exponent for exponent in _EXPONENTS for sign in (1, -1)] + [0.0])
    width = replica.rows_of(gate)
    pairs = torch.cartesian_prod(values, values).to(replica.device)
    z, u = (_in_rows(numbers, width) for numbers in pairs.T)
    # On the host: not every device has float64.
    received: Tensor = replica.with_rows(consumer, {gate: z, up: u}).cpu().double()
    factor = u.cpu().double() + up_offset
    expected = phi(z.cpu().double()) * factor
    # Like `activations.identify`, for φ in float32.
    return bool(((received - expected).abs() <= 1e-4 * expected.abs() + 1e-5 * factor.abs()).all())


def _in_rows(values: Tensor, width: int) -> Tensor:
    """Return the values as rows of a width, padded with zeros."""
    return nn.functional.pad(values, (0, -values.numel() % width)).reshape(-1, width)
