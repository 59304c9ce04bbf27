"""Observe: hooks that hand each gate pre-activation to the statistics, every learned token exactly once."""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from nalora.control.blocks import FFNBlock
from nalora.control.hooks import dead_hook
from nalora.control.replica import feature_sizes
from nalora.control.tokens import TokenMask
from nalora.distributed.shards import is_sharded
from nalora.errors import NALoRAError
from nalora.kernels.statistics import Accumulate, Sums

_keys = itertools.count()
_observers: weakref.WeakValueDictionary[int, GateObserver] = weakref.WeakValueDictionary()


class GateObserver:
    """Watches one FFN block and keeps its place in the window of the current optimizer step.

    A window holds what the next optimizer step learns from. `calls` counts the passes observed in it, and
    `gradient_arrived` says that a backward pass has reached the block's adapters since it opened.
    """

    def __init__(
        self,
        block: FFNBlock,
        thresholds: tuple[float, float],
        sums: Sums,
        token_mask: TokenMask,
        with_up: bool,
        accumulate: Accumulate,
        is_adapted_pass: Callable[[], bool],
    ) -> None:
        self.block, self.thresholds, self.sums, self.token_mask = block, thresholds, sums, token_mask
        self.with_up, self.accumulate = with_up, accumulate
        self.is_adapted_pass = is_adapted_pass
        self.gradient_is_gone: Callable[[], bool] = lambda: False
        self.parameters_were_replaced: Callable[[], bool] = lambda: False
        self.is_merged: Callable[[], bool] = lambda: False
        self.version: Callable[[], int] = lambda: 0
        self.stepped_elsewhere = 0
        self.applied: Callable[[], bool] = lambda: False
        self.abandon: Callable[[], None] = self.discard_window
        self.waiting: Tensor | None = None
        self.looking = True
        self._sizes = {role: sizes[1] for role, p in block.projections.items() if (sizes := feature_sizes(p.module))}
        self.open_window()
        self.key = next(_keys)
        _observers[self.key] = self

    def open_window(self) -> None:
        """Forget the passes of the last window; the sums are the caller's to zero."""
        self.calls = 0
        self.gradient_arrived = False
        self._first_pass_learned = False
        self._version_learned: int | None = None
        self.waiting = None

    def discard_window(self) -> None:
        """Drop what was observed for gradients that nobody will use."""
        self.open_window()
        self.sums.clear()

    @contextlib.contextmanager
    def blindfolded(self) -> Iterator[None]:
        """Let the block's layers run unobserved, for a fused layer that observes them itself."""
        self.looking = False
        try:
            yield
        finally:
            self.looking = True

    def register(self) -> list[RemovableHandle]:
        """Hook the block's layers; the handles remove it again."""
        gate, up = self.block.gate, self.block.up
        handles = [gate.module.register_forward_hook(_Hook(self, "gate"))]
        if self.with_up and up is not None and not self.block.fused:
            handles.append(up.module.register_forward_hook(_Hook(self, "up")))
        return handles

    def watch(self, parameter: nn.Parameter) -> RemovableHandle:
        """Learn when a backward pass reaches a parameter of the block."""
        hook = functools.partial(_gradient_arrived, weakref.ref(self))
        handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        return handle

    def see(self, role: str, output: Tensor) -> None:
        """Take the output of the gate (or up) layer; with both at hand where both are needed, count the tokens."""
        if is_sharded(output) or output.shape[-1] != self._sizes[role]:
            raise NALoRAError(
                self.block.projections[role].name,
                found=f"an output that is a part of itself: {output.shape[-1]} of {self._sizes[role]} channels"
                if not is_sharded(output)
                else "an output that is shared by processes (DTensor)",
                expected="every channel on every process: a quantile over a shard is another method",
                fix="train without tensor parallelism: DDP, or FSDP2's fully_shard",
            )
        output = output.detach()
        if not self.with_up or self.block.up is None:
            self._send(output[..., self.block.gate.rows], None)
        elif self.block.fused:
            self._send(output[..., self.block.gate.rows], output[..., self.block.up.rows])
        elif self.waiting is None:
            # Only a reference, for the moment between two neighbouring layers of the same forward pass.
            self.waiting = output
        else:
            first, self.waiting = self.waiting, None
            self._send(*((output, first) if role == "gate" else (first, output)))

    def _send(self, z: Tensor, u: Tensor | None) -> None:
        if u is not None and self.block.up_offset:
            u = u + self.block.up_offset
        mask = self.token_mask.of(z.shape[:-1])
        if torch.compiler.is_compiling():
            torch.ops.nalora.observe(z, u, mask, *self.sums, self.key)
        else:
            self.count(z, u, mask, self.sums)

    def count(self, z: Tensor, u: Tensor | None, mask: Tensor | None, sums: Sums) -> None:
        """Add a pass that the loss learns from to the sums, unless it was counted before."""
        if self._enters_the_window(z.device):
            self.accumulate(sums, z, self.block.activation, self.thresholds, u, mask)

    def claim(self, device: torch.device) -> Sums | None:
        """The sums that a fused layer adds this pass to while it computes, None where the pass does not count."""
        return self.sums if self._enters_the_window(device) else None

    def _enters_the_window(self, device: torch.device) -> bool:
        """Whether this pass is one more that the next optimizer step learns from.

        Inside a backward pass (a running graph task) a forward pass can only be a recomputation. It repeats a
        pass that was counted, unless that first pass ran under no_grad: then it was not told apart from a mere
        scoring pass, and the recomputation is the one that carries gradients (reentrant checkpointing).
        """
        recomputing = torch._C._current_graph_task_id() != -1
        if recomputing and self._first_pass_learned:
            return False
        if self.gradient_arrived and (self._was_stepped_elsewhere() or self.gradient_is_gone()):
            self.abandon()
        if self.applied():
            raise NALoRAError(
                self.block.name,
                found="another forward pass after the control was applied to these gradients",
                expected="optimizer.step() or optimizer.zero_grad() in between",
                fix="call controller.apply() or clip_grad_norm_() once, after the last backward of a step",
            )
        if device != self.sums.tokens.device:
            raise NALoRAError(
                self.block.name,
                found=f"gate outputs on {device}, statistics on {self.sums.tokens.device}",
                expected="the device the model was on when the controller was attached",
                fix="move the model first, then attach",
            )
        if self.calls == 0 and self.parameters_were_replaced():
            raise NALoRAError(
                self.block.name,
                found="other adapter parameters than the controller was attached to",
                expected="the model sharded (fully_shard) or loaded first, then the optimizer, then attach",
                fix="attach last, or call controller.bind(optimizer) with an optimizer of the new parameters",
            )
        if self.calls == 0 and self.is_merged():
            raise NALoRAError(
                self.block.name,
                found="merged adapters in a training pass, which then learn nothing",
                expected="adapters beside the weights they adapt",
                fix="unmerge before training on",
            )
        self._first_pass_learned |= not recomputing
        self.calls += 1
        return True

    def learn(self) -> None:
        """A backward pass has reached the block's adapters."""
        if not self.gradient_arrived:
            self.gradient_arrived, self._version_learned = True, self.version()

    def forget_steps_elsewhere(self) -> None:
        """The optimizer that made them is the one to follow from here on."""
        self.stepped_elsewhere = 0
        if self._has_moved():
            self.discard_window()

    def _has_moved(self) -> bool:
        return self._version_learned is not None and self.version() != self._version_learned

    def _was_stepped_elsewhere(self) -> bool:
        """Whether the adapters have moved since their gradient came, although the optimizer we follow made no step.

        Once may be a state that was loaded; twice in a row is another optimizer.
        """
        if not self._has_moved():
            return False
        self.stepped_elsewhere += 1
        if self.stepped_elsewhere > 1:
            raise NALoRAError(
                self.block.name,
                found="adapters that another optimizer steps than the one given to attach",
                expected="every step from the optimizer that the controller follows",
                fix="call controller.bind(optimizer) with the optimizer that steps now",
            )
        return True


class _Hook:
    """The forward hook on a layer. A deep copy or a pickle of the model gets a dead one in its place."""

    def __init__(self, observer: GateObserver, role: str) -> None:
        self.observer, self.role = observer, role

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        # The loss learns from no pass without gradients; generation in training mode (GRPO) is one, and its mask
        # covers the cached tokens too.
        learning = module.training and torch.is_grad_enabled() and self.observer.is_adapted_pass()
        if learning and self.observer.looking:
            self.observer.see(self.role, output)

    def __reduce__(self) -> tuple[Any, ...]:
        return dead_hook, ()


def _gradient_arrived(observer: weakref.ref[GateObserver], parameter: Tensor) -> None:
    """Weakly: a cycle through a tensor's hooks is one that Python cannot see, and would keep the model for good."""
    if (alive := observer()) is not None:
        alive.learn()


def is_observed(module: nn.Module) -> bool:
    """Whether a live observer already watches the layer."""
    return any(isinstance(hook, _Hook) for hook in module._forward_hooks.values())


# torch.compile sees one opaque operator: no graph break, no Python counter to guard on, and its body runs at every
# call, so that recomputations are recognised there as in eager mode.
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
