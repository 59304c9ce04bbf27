"""The window of an optimizer step: which forward passes it learns from, and what was decided from them.

A window opens when gradients are zeroed or a step is done, and collects passes until the next step. `StepWindow` is
that of the whole model, each of its `GateWindow`s the part of one FFN block, whose observer asks before it counts.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable

import torch
from peft.tuners.lora.layer import LoraLayer
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
    """The windows of all blocks, with the groups that decide for them and the parameters that they act on.

    Attributes:
        groups: the blocks' statistics and averages.
        parameters: the adapters that are controlled, as they were last looked at.
        gates: the window of each block, in the plan's order.
        decisions: what was decided for this step, None before.
        before: in update space, the controls of the step under way and a copy of what they act on.
        gradients_elsewhere: whether gradients are kept outside of the parameters, as DeepSpeed does.
    """

    def __init__(self, plans: tuple[BlockPlan, ...]) -> None:
        self.decisions: list[Decision] | None = None
        self.before: tuple[list[Control], dict[Tensor, Tensor]] | None = None
        self.gradients_elsewhere = False
        self.gates: list[GateWindow] = []
        self.settle(plans)
        self.gates = [GateWindow(plan.block, self._sums(plan.block), self) for plan in plans]

    def settle(self, plans: tuple[BlockPlan, ...]) -> None:
        """Start the statistics anew where the adapters are now."""
        self.groups, self._places = group_blocks(plans)
        self.parameters = ControlledParameters(plans, self.groups)
        for gate in self.gates:
            gate.sums = self._sums(gate.block)

    def is_where_it_was(self) -> bool:
        """Whether the adapters have neither been moved nor cast since the statistics were started."""
        return all(gate.block.statistics_kind == self._places[gate.block.name][0].kind for gate in self.gates)

    def _sums(self, block: FFNBlock) -> Sums:
        group, index = self._places[block.name]
        return group.sums(index)

    def open(self) -> None:
        """Forget the passes and decisions of the last step."""
        self.decisions = self.before = None
        for group in self.groups:
            group.open_window()
        for gate in self.gates:
            gate.open()

    def open_after_zeroing(self) -> None:
        """Forget a window whose gradients were thrown away; a forward pass still without one stays."""
        if any(gate.gradient_arrived for gate in self.gates):
            self.open()

    def commit(self, happened: Tensor | None) -> None:
        """Take the decisions over, unless the device says that the optimizer skipped its step; open the next window."""
        assert self.decisions is not None
        for group, decision in zip(self.groups, self.decisions, strict=True):
            group.commit(decision, happened)
        for gate in self.gates:
            gate.steps_elsewhere = 0
        self.open()

    def count_replay(self) -> None:
        """Take a pass as seen that a CUDA graph has replayed: its sums are there, but no Python hook ran."""
        for gate in self.gates:
            if not gate.passes:
                gate.passes, gate.gradient_arrived = 1, True

    def follow_other_optimizer(self) -> None:
        """Another optimizer's earlier steps are no mistake: it is the one to follow from here on."""
        for gate in self.gates:
            gate.steps_elsewhere = 0
            if gate.has_moved():
                gate.discard()


class GateWindow:
    """One block's part of the window.

    Attributes:
        sums: where the block's statistics are added up.
        passes: how many forward passes were counted.
        gradient_arrived: whether a backward pass has reached the block's adapters since the window opened.
        waiting: the output of one of two layers whose outputs are counted together, until the other one's is there.
        steps_elsewhere: how often in a row the adapters moved without a step of the optimizer that is followed.
    """

    passes: int
    gradient_arrived: bool
    waiting: Tensor | None
    _version_learned: int | None

    def __init__(self, block: FFNBlock, sums: Sums, step: StepWindow) -> None:
        self.block, self.sums, self._step = block, sums, step
        self._layers = [each.module for each in block.projections.values() if isinstance(each.module, LoraLayer)]
        self.steps_elsewhere = 0
        self.open()

    def open(self) -> None:
        """Forget the passes of the last window; the sums are the group's to zero."""
        self.passes = 0
        self.gradient_arrived = False
        self.waiting = None
        self._first_pass_learned = False
        self._version_learned = None

    def discard(self) -> None:
        """Drop what was observed for gradients that nobody will use."""
        self.open()
        self.sums.clear()

    def is_adapted(self) -> bool:
        """Whether a forward pass goes through the adapters at this moment."""
        return not self._layers[0].disable_adapters

    def admits(self, device: torch.device) -> bool:
        """Whether this pass is one more that the next optimizer step learns from; counts it if so.

        Inside a backward pass (a running graph task) a forward pass can only be a recomputation. It repeats a
        pass that was counted, unless that first pass ran under no_grad: then it was not told apart from a mere
        scoring pass, and the recomputation is the one that carries gradients (reentrant checkpointing).

        Raises:
            NALoRAError: a pass that cannot be counted, or that shows that the control would be wrong.
        """
        recomputing = torch._C._current_graph_task_id() != -1
        if recomputing and self._first_pass_learned:
            return False
        if self.gradient_arrived and (self._was_stepped_elsewhere() or self._gradient_is_gone()):
            self._abandon()
        self._refuse_wrong_pass(device)
        self._first_pass_learned |= not recomputing
        self.passes += 1
        return True

    def watch(self, parameter: nn.Parameter) -> Callable[[], None]:
        """Learn when a backward pass reaches a parameter of the block; what undoes it."""
        hook = functools.partial(_gradient_arrived, weakref.ref(self))
        handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        return handle.remove

    def note_gradient(self) -> None:
        """A backward pass has reached the block's adapters."""
        if not self.gradient_arrived:
            self.gradient_arrived, self._version_learned = True, self._version()

    def has_moved(self) -> bool:
        """Whether the adapters were written to since their gradient came."""
        return self._version_learned is not None and self._version() != self._version_learned

    def _version(self) -> int:
        return self._step.parameters.version(self._layers[0])

    def _gradient_is_gone(self) -> bool:
        trained = self._step.parameters.trained(self._layers[0])
        return not self._step.gradients_elsewhere and all(b.grad is None for b in trained)

    def _abandon(self) -> None:
        if self._step.decisions is not None:
            self._step.open()
        else:
            self.discard()

    def _was_stepped_elsewhere(self) -> bool:
        """Whether the adapters have moved since their gradient came, although the optimizer we follow made no step.

        Once may be a state that was loaded; twice in a row is another optimizer.
        """
        if not self.has_moved():
            return False
        self.steps_elsewhere += 1
        if self.steps_elsewhere > 1:
            raise NALoRAError(
                self.block.name,
                found="adapters that another optimizer steps than the one given to attach",
                expected="every step from the optimizer that the controller follows",
                fix="call controller.bind(optimizer) with the optimizer that steps now",
            )
        return True

    def _refuse_wrong_pass(self, device: torch.device) -> None:
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
                found="merged adapters in a training pass, which then learn nothing",
                expected="adapters beside the weights they adapt",
                fix="unmerge before training on",
            )


def _gradient_arrived(window: weakref.ref[GateWindow], parameter: Tensor) -> None:
    """Weakly: a cycle through a tensor's hooks is one that Python cannot see, and would keep the model for good."""
    if (alive := window()) is not None:
        alive.note_gradient()
