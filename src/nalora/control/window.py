"""The window of an optimizer step: the forward passes whose gradients it uses, and the decision made from them.

A window opens when gradients are zeroed or a step is done, and collects passes until the next step. `StepWindow` is the
window of the whole model, a `GateWindow` the part of one FFN block; it decides whether its observer counts a pass.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from nalora.control.apply import Control
from nalora.control.blocks import FFNBlock
from nalora.control.decision import Decision, group_blocks
from nalora.control.parameters import ControlledParameters
from nalora.control.plan import BlockPlan
from nalora.errors import NALoRAError
from nalora.kernels.statistics import Sums


class StepWindow:
    """The windows of all blocks, the groups that decide for them, and the parameters that they act on.

    Attributes:
        groups: the blocks' statistics and averages.
        parameters: the controlled adapters as of the last refresh.
        gates: the window of each block, in the plan's order.
        decisions: the decisions of this step, None before they are made.
        before: in update space, the controls of the current step and a copy of the parameters they act on.
        gradients_elsewhere: whether gradients are stored outside of the parameters, as in DeepSpeed.
    """

    def __init__(self, plans: tuple[BlockPlan, ...]) -> None:
        self.decisions: list[Decision] | None = None
        self.before: tuple[list[Control], dict[Tensor, Tensor]] | None = None
        self.gradients_elsewhere = False
        self.gates: list[GateWindow] = []
        self.start(plans)
        self.gates = [GateWindow(plan.block, self._sums(plan.block), self) for plan in plans]

    def start(self, plans: tuple[BlockPlan, ...]) -> None:
        """Start new statistics on the adapters' current device and dtype."""
        self.groups, self._places = group_blocks(plans)
        self.parameters = ControlledParameters(plans, self.groups)
        for gate in self.gates:
            gate.sums = self._sums(gate.block)

    def fits_adapters(self) -> bool:
        """Return whether the adapters still have the device and dtype for which the statistics were started."""
        return all(gate.block.statistics_kind == self._places[gate.block.name][0].kind for gate in self.gates)

    def _sums(self, block: FFNBlock) -> Sums:
        group, index = self._places[block.name]
        return group.sums(index)

    def open(self) -> None:
        """Discard the passes and decisions of the last step."""
        self.decisions = self.before = None
        for group in self.groups:
            group.open_window()
        for gate in self.gates:
            gate.open()

    def open_after_zeroing(self) -> None:
        """Open a new window if gradients were discarded; a forward pass without a backward pass yet is kept."""
        if any(gate.gradient_arrived for gate in self.gates):
            self.open()

    def commit(self, happened: Tensor | None) -> None:
        """Commit the decisions (see `BlockGroup.commit`) and open the next window."""
        assert self.decisions is not None
        for group, decision in zip(self.groups, self.decisions, strict=True):
            group.commit(decision, happened)
        for gate in self.gates:
            gate.foreign_steps = 0
        self.open()

    def count_replay(self) -> None:
        """Count a pass that a CUDA graph has replayed: it updated the sums without running a Python hook."""
        for gate in self.gates:
            if not gate.passes:
                gate.passes, gate.gradient_arrived = 1, True

    def change_optimizer(self) -> None:
        """Accept earlier steps of another optimizer, which the controller is bound to from now on."""
        for gate in self.gates:
            gate.foreign_steps = 0
            if gate.has_moved():
                gate.discard()


class GateWindow:
    """One block's part of the window.

    Attributes:
        sums: the block's statistics.
        passes: the number of forward passes counted.
        gradient_arrived: whether a backward pass has reached the block's adapters since the window opened.
        waiting: the output of one of two layers that are counted together, until the other output arrives.
        foreign_steps: how often in a row the adapters changed without a step of the bound optimizer.
    """

    passes: int
    gradient_arrived: bool
    waiting: Tensor | None
    _version_at_gradient: int | None

    def __init__(self, block: FFNBlock, sums: Sums, step: StepWindow) -> None:
        self.block, self.sums, self._step = block, sums, step
        self._layers = [p.module for p in block.projections.values() if p.adapted]
        self.foreign_steps = 0
        self.open()

    def open(self) -> None:
        """Discard the passes of the last window; the group zeroes the sums."""
        self.passes, self.gradient_arrived, self.waiting = 0, False, None
        self._first_pass_counted, self._version_at_gradient = False, None

    def discard(self) -> None:
        """Discard the observations for gradients that will not be used."""
        self.open()
        self.sums.clear()

    def is_adapted(self) -> bool:
        """Return whether adapters are enabled."""
        return not self._layers[0].disable_adapters

    def admits(self, device: torch.device) -> bool:
        """Return whether the next optimizer step uses the gradients of this pass, and count the pass if so.

        A forward pass inside a backward pass (a running graph task) is a recomputation. It repeats a counted pass,
        unless the first pass ran under no_grad (reentrant checkpointing): that one looked like a pass without training,
        and the recomputation is the one with gradients.

        Raises:
            NALoRAError: a pass that cannot be counted, or for which the control would be wrong.
        """
        recomputing = torch._C._current_graph_task_id() != -1
        if recomputing and self._first_pass_counted:
            return False
        if self.gradient_arrived and (self._had_foreign_step() or self._gradient_is_gone()):
            if self._step.decisions is not None:
                self._step.open()
            else:
                self.discard()
        self._check_pass(device)
        self._first_pass_counted |= not recomputing
        self.passes += 1
        return True

    def watch(self, parameter: nn.Parameter) -> Callable[[], None]:
        """Record when a backward pass reaches a parameter of the block; the function returned removes the hook."""
        hook = functools.partial(_note_gradient, weakref.ref(self))
        handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        return handle.remove

    def note_gradient(self) -> None:
        """Record that a backward pass has reached the block's adapters."""
        if not self.gradient_arrived:
            self.gradient_arrived, self._version_at_gradient = True, self._version()

    def has_moved(self) -> bool:
        """Return whether the adapters were written to since their gradient arrived."""
        return self._version_at_gradient is not None and self._version() != self._version_at_gradient

    def _version(self) -> int:
        return self._step.parameters.version(self._layers[0])

    def _gradient_is_gone(self) -> bool:
        trained = self._step.parameters.trained(self._layers[0])
        return not self._step.gradients_elsewhere and all(b.grad is None for b in trained)

    def _had_foreign_step(self) -> bool:
        """Return whether the adapters changed since their gradient arrived, without a step of the bound optimizer.

        The first time may be a loaded state; the second time in a row is another optimizer.
        """
        if not self.has_moved():
            return False
        self.foreign_steps += 1
        if self.foreign_steps > 1:
            raise NALoRAError(
                self.block.name,
                found="adapters that another optimizer steps than the one passed to attach",
                expected="only steps of the optimizer that the controller is bound to",
                fix="call controller.bind(optimizer) with the optimizer that steps now",
            )
        return True

    def _check_pass(self, device: torch.device) -> None:
        if self._step.decisions is not None:
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
        if self.passes == 0 and self._step.parameters.were_replaced(self._layers[0]):
            raise NALoRAError(
                self.block.name,
                found="other adapter parameters than the controller was attached to",
                expected="the model sharded (fully_shard) or loaded first, then the optimizer, then attach",
                fix="attach last, or call controller.bind(optimizer) with an optimizer of the new parameters",
            )
        if self.passes == 0 and any(layer.merged for layer in self._layers):
            raise NALoRAError(
                self.block.name,
                found="merged adapters in a training pass, which are not trained",
                expected="adapters separate from the weights they adapt",
                fix="unmerge before training",
            )


def _note_gradient(window: weakref.ref[GateWindow], parameter: Tensor) -> None:
    """Call `note_gradient`. Weakly, since Python cannot collect a cycle through a tensor's hooks."""
    if (alive := window()) is not None:
        alive.note_gradient()
