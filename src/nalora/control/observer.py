"""Hooks that add each gate pre-activation to the statistics, every trained token exactly once."""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from nalora.control.blocks import FFNBlock
from nalora.control.replica import feature_sizes
from nalora.control.tokens import TokenMask
from nalora.control.window import GateWindow
from nalora.distributed.shards import is_sharded
from nalora.errors import NALoRAError
from nalora.kernels.fused.foreign import ServedHook
from nalora.kernels.inert_hook import inert_hook
from nalora.kernels.statistics import Accumulate, Sums

_keys = itertools.count()
_observers: weakref.WeakValueDictionary[int, GateObserver] = weakref.WeakValueDictionary()


@dataclass(eq=False)
class GateObserver:
    """Observes the gate of one FFN block, and its up projection where both are needed.

    Attributes:
        block: the block.
        thresholds: the thresholds between the regimes of its activation.
        window: decides which passes count, and holds the sums.
        token_mask: the mask of padding tokens.
        with_up: whether the statistics need the output of the up projection.
        accumulate: adds a pass to the sums.
    """

    block: FFNBlock
    thresholds: tuple[float, float]
    window: GateWindow
    token_mask: TokenMask
    with_up: bool
    accumulate: Accumulate

    def __post_init__(self) -> None:
        sizes = {role: feature_sizes(p.module) for role, p in self.block.projections.items()}
        self._channels = {role: size[1] for role, size in sizes.items() if size}
        self.key = next(_keys)
        _observers[self.key] = self

    def register(self) -> list[RemovableHandle]:
        """Hook the block's layers; the handles remove the hooks."""
        gate, up = self.block.gate, self.block.up
        handles = [gate.module.register_forward_hook(_Hook(self, "gate"))]
        if self.with_up and up is not None and not self.block.fused:
            handles.append(up.module.register_forward_hook(_Hook(self, "up")))
        return handles

    def receive(self, role: str, output: Tensor) -> None:
        """Take the output of the gate (or up) layer; count its tokens once all outputs that are needed are there."""
        if is_sharded(output) or output.shape[-1] != self._channels[role]:
            part = f"only a part of the output: {output.shape[-1]} of {self._channels[role]} channels"
            raise NALoRAError(
                self.block.projections[role].name,
                found="an output that is sharded over processes (DTensor)" if is_sharded(output) else part,
                expected="every channel on every process: a quantile over a shard is another method",
                fix="train without tensor parallelism: DDP, or FSDP2's fully_shard",
            )
        output = output.detach()
        if not self.with_up or self.block.up is None:
            self._send(output[..., self.block.gate.rows], None)
        elif self.block.fused:
            self._send(output[..., self.block.gate.rows], output[..., self.block.up.rows])
        elif self.window.waiting is None:
            # A reference, held only between two neighbouring layers of the same forward pass.
            self.window.waiting = output
        else:
            first, self.window.waiting = self.window.waiting, None
            self._send(*((output, first) if role == "gate" else (first, output)))

    def _send(self, z: Tensor, u: Tensor | None) -> None:
        if u is not None and self.block.up_offset:
            u = u + self.block.up_offset
        mask = self.token_mask.of(z.shape[:-1])
        if torch.compiler.is_compiling():
            torch.ops.nalora.observe(z, u, mask, *self.window.sums, self.key)
        else:
            self.count(z, u, mask, self.window.sums)

    def count(self, z: Tensor, u: Tensor | None, mask: Tensor | None, sums: Sums) -> None:
        """Add a training pass to the sums, unless it was counted before."""
        if self.window.admits(z.device):
            self.accumulate(sums, z, self.block.activation, self.thresholds, u, mask)

    def begin_pass(self, shape: torch.Size, device: torch.device) -> tuple[Sums | None, Tensor | None]:
        """Return the sums that a fused FFN adds this training pass to, None if it does not count, and its token mask.

        Args:
            shape: the leading dimensions of the input.
            device: where it is.
        """
        mask = self.token_mask.of(shape)
        return (self.window.sums if self.window.admits(device) else None), mask


class _Hook(ServedHook):
    """The forward hook on a layer. A deep copy or a pickle of the model gets an inert one in its place."""

    def __init__(self, observer: GateObserver, role: str) -> None:
        self.observer, self.role = observer, role

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        # No pass without gradients is trained on; generation in training mode (GRPO) is one, and its mask covers the
        # cached tokens too.
        if module.training and torch.is_grad_enabled() and self.observer.window.is_adapted():
            self.observer.receive(self.role, output)

    def __reduce__(self) -> tuple[Any, ...]:
        return inert_hook, ()


def is_observed(module: nn.Module) -> bool:
    """Return whether the layer has the hook of an observer."""
    return any(isinstance(hook, _Hook) for hook in module._forward_hooks.values())


# For torch.compile this is one opaque operator: no graph break, no guard on a Python counter. Its body runs at every
# call, so that recomputations are recognised as in eager mode.
@torch.library.custom_op("nalora::observe", mutates_args=("sensitivity", "outside", "tokens"))
def _observe(
    z: Tensor,
    u: Tensor | None,
    mask: Tensor | None,
    sensitivity: Tensor,
    outside: Tensor,
    tokens: Tensor,
    key: int,
) -> None:
    observer = _observers.get(key)
    if observer is not None:
        observer.count(z, u, mask, Sums(sensitivity, outside, tokens))
