"""The controller: observe → decide → apply around any optimizer, for the length of a training run."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from nalora.config import Kernels, NALoRAConfig
from nalora.control import checkpoint, deepspeed, refusals
from nalora.control.apply import Control, multiply_gradients, multiply_updates, snapshot
from nalora.control.blocks import Discovery, find_blocks
from nalora.control.metrics import measure
from nalora.control.observer import GateObserver
from nalora.control.plan import BlockPlan, Plan, make_plan
from nalora.control.stepping import follow_steps
from nalora.control.tokens import TokenMask, register_mask_hooks
from nalora.control.window import GateWindow, StepWindow
from nalora.distributed.shards import clip_grad_norm_, sharing_processes
from nalora.distributed.wrappers import ranks_of, unwrapped
from nalora.errors import NALoRAError

_ADAM_NOTICE = (
    "nalora: Adam divides a steady factor out of its gradients (a factor of 0.1 leaves 0.9999 of the update), so in"
    " gradient space only the start-up transient of mask and scales acts; apply_to='update' makes them last."
)


def attach(
    model: nn.Module, optimizer: Optimizer, config: NALoRAConfig | None = None, *, kernels: Kernels = "auto"
) -> NALoRAController:
    """Train the LoRA adapters of `model` nonlinearity-aware from here on.

    The training loop stays as it is. To act before clipping, as the paper's hooks do, call
    `controller.clip_grad_norm_` in place of torch's, or `controller.apply()` before it.

    Args:
        model: any model with PEFT LoRA layers; sharded by FSDP2's `fully_shard`, wrapped by DDP or by DeepSpeed's
            engine before this.
        optimizer: the torch optimizer that steps them, or DeepSpeed's; Accelerate's wrapper is looked through.
        config: the settings; the paper's by default.
        kernels: ``"auto"`` chooses how statistics are computed, ``"off"`` takes the reference; both leave the model's
            arithmetic alone. ``"fused"`` also computes FFNs and LoRA layers as single functions on a GPU.

    Raises:
        NALoRAError: nothing to control, or something that would make the control silently wrong.
    """
    controller = NALoRAController(model, config, kernels=kernels)
    try:
        deepspeed.refuse_engine_without_zero(model, optimizer)
        controller.bind(optimizer)
    except NALoRAError:
        controller.detach()
        raise
    return controller


class NALoRAController:
    """Holds the hooks, the state and the plan of one model; made by `attach` or `attach_trainer`."""

    def __init__(self, model: nn.Module, config: NALoRAConfig | None = None, *, kernels: Kernels = "auto") -> None:
        refusals.if_arguments_are_mixed_up(model, config)
        self.config = config or NALoRAConfig()
        self.model = unwrapped(model)
        self._kernels = kernels
        refusals.if_kernels_are_unknown(kernels)
        refusals.if_flattened(self.model)
        self.plan: Plan = make_plan(find_blocks(self.model), self.config, kernels)
        refusals.if_watched(self.plan)
        refusals.if_tensor_parallel(self.model, self.plan)
        if kernels == "fused":
            refusals.if_kernels_cannot_run(self.plan)

        self._optimizer: Optimizer | None = None
        self._let_go_of_optimizer: list[Callable[[], None]] = []
        self._undo: list[Callable[[], None]] = []
        self._given_ranks = ranks_of(model)
        self._ranks: dist.ProcessGroup | None = None

        self._window = StepWindow(self.plan.blocks)
        masks, handles = register_mask_hooks(self.model, [each.block.gate.name for each in self.plan.blocks])
        self._undo += [handle.remove for handle in handles]
        self._observers = [
            self._observe(each, window, masks[each.block.gate.name])
            for each, window in zip(self.plan.blocks, self._window.gates, strict=True)
        ]
        self._watched_gradients: set[nn.Parameter] = set()
        self._look_at_parameters()
        if kernels == "fused":
            from nalora.control.fusing import fuse  # Triton is not everywhere

            self._undo += fuse(self.model, self.plan, self._observers)

    # ---- observe -------------------------------------------------------------------------------------------------

    def _observe(self, plan: BlockPlan, window: GateWindow, token_mask: TokenMask) -> GateObserver:
        observer = GateObserver(
            plan.block,
            plan.thresholds,
            window,
            token_mask,
            with_up=self.config.importance == "utility",
            accumulate=plan.engine.accumulate,
        )
        self._undo += [handle.remove for handle in observer.register()]
        return observer

    def _look_at_parameters(self) -> None:
        """See which adapters are active, who shares them, and when a backward pass reaches them."""
        parameters = self._window.parameters
        if not parameters.refresh():
            return
        refusals.if_tensor_parallel(self.model, self.plan)
        if self._optimizer is not None:
            refusals.if_parameters_are_missing(self.model, self.plan, self._optimizer)
        self._ranks = self._given_ranks or sharing_processes(parameters.named())
        for window in self._window.gates:
            for projection in window.block.projections.values():
                for b in parameters.trained(projection.module):
                    if b.requires_grad and b not in self._watched_gradients:
                        self._watched_gradients.add(b)
                        self._undo.append(window.watch(b))

    def note_replay(self) -> None:
        """Take a pass as seen that a CUDA graph has replayed: its sums are there, but no Python hook ran."""
        self._window.count_replay()

    def settle(self) -> None:
        """Keep the statistics where the adapters are now, the averages as they were.

        For a model that is moved or cast after `attach`, as Accelerate does with FSDP2 when training starts.
        """
        if self._window.is_where_it_was():
            return
        state = self.state_dict()
        found = Discovery(
            tuple(each.block for each in self.plan.blocks),
            self.plan.refused,
            self.plan.others,
            self.plan.passed_over,
            rewrites=bool(self.plan.passed_over),
        )
        self.plan = make_plan(found, self.config, self._kernels)
        self._window.settle(self.plan.blocks)
        for plan, observer in zip(self.plan.blocks, self._observers, strict=True):
            observer.accumulate = plan.engine.accumulate
        # A model without weights yet has no averages either.
        if not any(each.is_meta for each in state["tensors"].values()):
            self.load_state_dict(state)

    # ---- decide and apply ----------------------------------------------------------------------------------------

    def apply(self) -> None:
        """Decide for this optimizer step and, in gradient space, multiply the gradients; once per step.

        Call it after the last backward pass and before clipping. Without a call the optimizer's step does it.

        Raises:
            NALoRAError: a gate's adapter has a gradient although its gate was never observed.
        """
        window = self._window
        if window.decisions is not None:
            return
        self._look_at_parameters()
        refusals.unless_gates_were_observed(window.gates)
        if not any(gate.passes for gate in window.gates):
            refusals.if_layers_are_gone(self.model, self.plan)
        window.decisions = [group.decide(self.config, self._ranks) for group in window.groups]
        if self.config.apply_to == "gradient":
            multiply = deepspeed.multiply_gradients if deepspeed.is_deepspeed(self._optimizer) else multiply_gradients
            multiply(self._controls())

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, **options: Any) -> Tensor:
        """`torch.nn.utils.clip_grad_norm_` over the optimizer's parameters, after the control was applied.

        Raises:
            NALoRAError: DeepSpeed, which clips in its own step.
        """
        refusals.if_clipped_elsewhere(self._optimizer)
        self.apply()
        return clip_grad_norm_(self._optimizer_parameters(), max_norm, norm_type, **options)

    def _controls(self) -> list[Control]:
        return self._window.parameters.controls(self._window.decisions or [], self.config.preserve_mean)

    # ---- around the optimizer ------------------------------------------------------------------------------------

    def bind(self, optimizer: Optimizer) -> None:
        """Act around this optimizer's steps, in place of any other.

        Raises:
            NALoRAError: an optimizer that cannot be acted around, or one that does not hold the LoRA parameters.
        """
        optimizer = refusals.unless_known_optimizer(optimizer)
        if deepspeed.is_deepspeed(optimizer):
            deepspeed.refuse_unusable(optimizer, self.config)
        refusals.if_nothing_learns(self.plan)
        refusals.if_parameters_are_missing(self.model, self.plan, optimizer)
        if optimizer is self._optimizer:
            self._look_at_parameters()
            return
        self._unbind()
        self._look_at_parameters()
        self._window.follow_other_optimizer()
        self._optimizer = optimizer
        self._window.gradients_elsewhere = deepspeed.is_deepspeed(optimizer)
        if self._window.gradients_elsewhere:
            undo = deepspeed.follow_steps(optimizer, self._enter_step, self._leave_step, self.open_window)
        else:
            undo = follow_steps(optimizer, self._enter_step, self._leave_step, self._gradients_zeroed)
        self._let_go_of_optimizer = undo
        if self.config.apply_to == "gradient" and "adam" in type(optimizer).__name__.lower():
            _tell_once(_ADAM_NOTICE)

    def _unbind(self) -> None:
        for let_go in self._let_go_of_optimizer:
            let_go()
        self._let_go_of_optimizer = []
        self._optimizer = None

    def _enter_step(self) -> None:
        self.apply()
        if self.config.apply_to == "update":
            controls = self._controls()
            self._window.before = controls, snapshot(controls)

    def _leave_step(self, happened: Tensor | None = None) -> None:
        if self._window.decisions is None:
            return
        if self._window.before is not None:
            multiply_updates(*self._window.before)
        self._window.commit(happened)

    def _gradients_zeroed(self, *_: Any, **__: Any) -> None:
        self._window.open_after_zeroing()

    def open_window(self) -> None:
        """Forget what was observed and decided since the last step, as zeroed gradients do."""
        self._window.open()

    def _optimizer_parameters(self) -> Iterable[Tensor]:
        assert self._optimizer is not None
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    # ---- what users read -----------------------------------------------------------------------------------------

    def metrics(self, per_block: bool = False) -> dict[str, float]:
        """The state after the last step as floats for loggers; means over blocks, or each block's own as well.

        Regime shares and the score a are means over the tokens of the last step. ``scale_*`` and ``mask_mean`` are the
        factors that the steps are multiplied by: 1 for a block or projection that a control does not act on;
        `mask_acts` and `scaling_acts` give the share of blocks with that control. A value that the controller follows
        and does not apply is called ``followed_scale_gate`` and so on. `stability` is the mean change of the mask in
        the last step; `skipped_updates` counts block updates left out for non-finite z or for want of tokens.
        """
        preserve_mean = self.config.preserve_mean
        return measure(self._window.groups, self.plan.blocks, preserve_mean=preserve_mean, per_block=per_block)

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs, by block name, with the version of its form."""
        return checkpoint.state_of(self._window.groups, self.config)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved state; nothing changes where it does not fit.

        Raises:
            NALoRAError: another version, other blocks, other widths.
        """
        checkpoint.restore(self._window.groups, self.config, state)
        self.open_window()

    def save(self, folder: str | Path) -> Path:
        """Write the state as one safetensors file into `folder`, whole or not at all; its path."""
        return checkpoint.save(self.state_dict(), Path(folder))

    def load(self, folder: str | Path) -> None:
        """Read what `save` wrote.

        Raises:
            NALoRAError: no file there, a damaged one, or one of another model or version.
        """
        self.load_state_dict(checkpoint.load(Path(folder)))

    def detach(self) -> None:
        """Take every hook off the model and the optimizer; the adapters stay as they are."""
        self._unbind()
        for undo in self._undo:
            undo()
        self._undo = []

    def on_detach(self, undo: Callable[[], None]) -> None:
        """Have `undo` run when the controller is detached."""
        self._undo.append(undo)


@functools.cache
def _tell_once(sentence: str) -> None:
    warnings.warn(sentence, stacklevel=4)
