"""The controller: observe → decide → apply around any optimizer, for the length of a training run."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
from peft.tuners.lora.layer import LoraLayer
from torch import Tensor, nn
from torch.optim import Optimizer

from nalora.config import NALoRAConfig
from nalora.control import checkpoint, deepspeed, refusals
from nalora.control.apply import Control, multiply_gradients, multiply_updates, snapshot
from nalora.control.blocks import Discovery, find_blocks
from nalora.control.decision import Decision, group_blocks
from nalora.control.metrics import measure
from nalora.control.observer import GateObserver
from nalora.control.parameters import ControlledParameters
from nalora.control.plan import BlockPlan, Plan, make_plan
from nalora.control.stepping import follow_steps
from nalora.control.tokens import watch_masks
from nalora.distributed.shards import clip_grad_norm_, sharing_processes
from nalora.distributed.wrappers import ranks_of, unwrapped
from nalora.errors import NALoRAError

Kernels = Literal["auto", "off", "fused", "fused-activation"]

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
            arithmetic alone. ``"fused"`` also computes FFNs and LoRA layers as single functions on a GPU,
            ``"fused-activation"`` only the product φ(z) ⊙ u.

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
        if fused := kernels.startswith("fused"):
            refusals.if_kernels_cannot_run(self.plan)

        self._groups, self._places = group_blocks(self.plan.blocks)
        self._optimizer: Optimizer | None = None
        self._let_go_of_optimizer: list[Callable[[], None]] = []
        self._undo: list[Callable[[], None]] = []
        self._decisions: list[Decision] | None = None
        self._controlled = ControlledParameters(self.plan.blocks, self._groups)
        self._given_ranks = ranks_of(model)
        self._ranks: dist.ProcessGroup | None = None
        self._before: tuple[list[Control], dict[Tensor, Tensor]] | None = None

        masks, handles = watch_masks(self.model, [each.block.gate.name for each in self.plan.blocks])
        self._undo += [handle.remove for handle in handles]
        self._observers = [self._observe(each, masks[each.block.gate.name]) for each in self.plan.blocks]
        self._watched_gradients: set[nn.Parameter] = set()
        self._look_at_parameters()
        if fused:
            from nalora.control.fusing import fuse

            self._undo += fuse(self.model, self.plan, self._observers, adapters=kernels == "fused")

    # ---- observe -------------------------------------------------------------------------------------------------

    def _observe(self, plan: BlockPlan, token_mask: Any) -> GateObserver:
        group, index = self._places[plan.block.name]
        layers = [p.module for p in plan.block.projections.values() if isinstance(p.module, LoraLayer)]
        observer = GateObserver(
            plan.block,
            plan.thresholds,
            group.sums(index),
            token_mask,
            with_up=self.config.importance == "utility",
            accumulate=plan.engine.accumulate,
            is_adapted_pass=lambda: not layers[0].disable_adapters,
        )
        observer.gradient_is_gone = lambda: self._gradients_are_gone(layers[0])
        observer.parameters_were_replaced = lambda: self._controlled.were_replaced(layers[0])
        observer.is_merged = lambda: any(layer.merged for layer in layers)
        observer.version = lambda: self._controlled.version(layers[0])
        observer.applied = lambda: self._decisions is not None
        observer.abandon = lambda: self._open_window() if self._decisions is not None else observer.discard_window()
        self._undo += [handle.remove for handle in observer.register()]
        return observer

    def _gradients_are_gone(self, layer: nn.Module) -> bool:
        # DeepSpeed keeps them elsewhere.
        if deepspeed.is_deepspeed(self._optimizer):
            return False
        return all(b.grad is None for b in self._controlled.trained(layer))

    def _look_at_parameters(self) -> None:
        """See which adapters are active, who shares them, and when a backward pass reaches them."""
        if not self._controlled.refresh():
            return
        refusals.if_tensor_parallel(self.model, self.plan)
        if self._optimizer is not None:
            refusals.if_parameters_are_missing(self.model, self.plan, self._optimizer)
        self._ranks = self._given_ranks or sharing_processes(self._controlled.named())
        for plan, observer in zip(self.plan.blocks, self._observers, strict=True):
            for projection in plan.block.projections.values():
                for b in self._controlled.trained(projection.module):
                    if b.requires_grad and b not in self._watched_gradients:
                        self._watched_gradients.add(b)
                        self._undo.append(observer.watch(b).remove)

    def note_replay(self) -> None:
        """Take a pass as seen that a CUDA graph has replayed: its sums are there, but no Python hook ran."""
        for observer in self._observers:
            if not observer.calls:
                observer.calls, observer.gradient_arrived = 1, True

    def settle(self) -> None:
        """Keep the statistics where the adapters are now, the averages as they were.

        For a model that is moved or cast after `attach`, as Accelerate does with FSDP2 when training starts.
        """
        now = [each.block.statistics_kind for each in self.plan.blocks]
        if now == [self._places[each.block.name][0].kind for each in self.plan.blocks]:
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
        self._groups, self._places = group_blocks(self.plan.blocks)
        self._controlled = ControlledParameters(self.plan.blocks, self._groups)
        for plan, observer in zip(self.plan.blocks, self._observers, strict=True):
            group, index = self._places[plan.block.name]
            observer.sums, observer.accumulate = group.sums(index), plan.engine.accumulate
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
        if self._decisions is not None:
            return
        self._look_at_parameters()
        refusals.unless_gates_were_observed(self._observers)
        if not any(observer.calls for observer in self._observers):
            refusals.if_layers_are_gone(self.model, self.plan)
        self._decisions = [group.decide(self.config, self._ranks) for group in self._groups]
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
        return self._controlled.controls(self._decisions or [], self.config.preserve_mean)

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
        for observer in self._observers:
            observer.forget_steps_elsewhere()
        self._optimizer = optimizer
        if deepspeed.is_deepspeed(optimizer):
            undo = deepspeed.follow_steps(optimizer, self._enter_step, self._leave_step, self._open_window)
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
            self._before = controls, snapshot(controls)

    def _leave_step(self, happened: Tensor | None = None) -> None:
        if self._decisions is None:
            return
        if self._before is not None:
            multiply_updates(*self._before)
        for group, decision in zip(self._groups, self._decisions, strict=True):
            group.commit(decision, happened)
        for observer in self._observers:
            observer.stepped_elsewhere = 0
        self._open_window()

    def _gradients_zeroed(self, *_: Any, **__: Any) -> None:
        """Forget a window whose gradients were thrown away; a forward pass still without one stays."""
        if any(observer.gradient_arrived for observer in self._observers):
            self._open_window()

    def _open_window(self) -> None:
        self._decisions = self._before = None
        for group in self._groups:
            group.open_window()
        for observer in self._observers:
            observer.open_window()

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
        return measure(self._groups, self.plan.blocks, preserve_mean=preserve_mean, per_block=per_block)

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs, by block name, with the version of its form."""
        return checkpoint.state_of(self._groups, self.config)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved state; nothing changes where it does not fit.

        Raises:
            NALoRAError: another version, other blocks, other widths.
        """
        checkpoint.restore(self._groups, self.config, state)
        self._open_window()

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
