"""The controller: collects statistics, decides, and acts around any optimizer's steps during a training run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import Unpack

from nalora.config import Kernels, NALoRAConfig, Settings, config_of
from nalora.control import checkpoint, checks, deepspeed
from nalora.control.apply import Control, multiply_gradients, multiply_updates, snapshot
from nalora.control.blocks import Discovery, find_blocks
from nalora.control.expert_observer import ExpertsObserver
from nalora.control.fused_model import fused_layers
from nalora.control.gate_taps import Tap
from nalora.control.hooks import hook_steps
from nalora.control.metrics import measure
from nalora.control.observer import GateObserver
from nalora.control.plan import Plan, make_plan
from nalora.control.tokens import register_mask_hooks
from nalora.control.window import StepWindow
from nalora.distributed.shards import clip_grad_norm_, sharing_processes
from nalora.distributed.wrappers import ranks_of, unwrapped
from nalora.errors import NALoRAError
from nalora.kernels.fused.linears import fuse_adapters
from nalora.kernels.statistics.engines import has_triton, triton_runs_on

_ADAM_NOTICE = (
    "Adam cancels a constant factor of its gradients (a factor of 0.1 leaves 0.9999 of the update), so in"
    " gradient space mask and scales act only in the first steps; with apply_to='update' they act throughout"
)


def attach(
    model: nn.Module,
    optimizer: Optimizer,
    config: NALoRAConfig | None = None,
    *,
    kernels: Kernels = "auto",
    **settings: Unpack[Settings],
) -> NALoRAController:
    """Train the LoRA adapters of `model` with NA-LoRA from now on.

    The training loop stays as it is. To act before clipping, as the paper's hooks do, call
    `controller.clip_grad_norm_` in place of torch's, or `controller.apply()` before it.

    Args:
        model: any model with PEFT LoRA layers; call FSDP2's `fully_shard`, DDP or DeepSpeed on it before this.
        optimizer: the torch or DeepSpeed optimizer that steps them, also inside Accelerate's wrapper.
        config: the settings; by default the paper's.
        kernels: ``"auto"`` chooses how statistics are computed, ``"off"`` uses the reference implementation; both leave
            the model's arithmetic unchanged. ``"fused"`` also computes FFNs and LoRA layers as single functions on a
            GPU; for a model that `nalora.fuse` has fused, ``"auto"`` does so too.
        **settings: fields of `NALoRAConfig`, such as ``apply_to="update"``, in place of `config`.

    Raises:
        NALoRAError: a model without anything to control, or a setup in which the control would be wrong.
    """
    controller = NALoRAController(model, config_of("attach", config, settings), kernels=kernels)
    try:
        deepspeed.check_engine(model, optimizer)
        controller.bind(optimizer)
    except NALoRAError:
        controller.detach()
        raise
    return controller


class NALoRAController:
    """The hooks, the state and the plan of one model; created by `attach` or `attach_trainer`."""

    def __init__(self, model: nn.Module, config: NALoRAConfig | None = None, *, kernels: Kernels = "auto") -> None:
        checks.check_arguments(model, config, kernels)
        self.config = config or NALoRAConfig()
        self.model = unwrapped(model)
        # Fused layers hide their gates; they come back when the controller is detached.
        self._fused_before = fused_layers(self.model)
        if self._fused_before is not None:
            device = next(self.model.parameters()).device
            kernels = "fused" if kernels == "auto" and has_triton() and triton_runs_on(device) else kernels
            self._fused_before.refuse_kernels(kernels)
            self._fused_before.remove()
        self._kernels = kernels
        self._undo: list[Callable[[], None]] = []
        self._optimizer: Optimizer | None = None
        self._unhook_optimizer: list[Callable[[], None]] = []
        try:
            self._start(model)
        except BaseException:
            self.detach()
            raise

    def _start(self, model: nn.Module) -> None:
        """Find the blocks and hook them; `model` is the model as it was passed, with its wrappers."""
        kernels = self._kernels
        checks.check_not_flattened(self.model)
        self.plan: Plan = make_plan(find_blocks(self.model), self.config, kernels)
        checks.check_plan(self.plan, kernels)
        checks.check_sharding(self.model, self.plan)

        self._wrapper_ranks = ranks_of(model)
        self._ranks: dist.ProcessGroup | None = None
        self._window = StepWindow(self.plan.blocks)
        self._watched_gradients: set[nn.Parameter] = set()
        self._observers = self._observe()
        self._refresh_parameters()
        if kernels == "fused":
            from nalora.control.fused_ffn import fuse  # Triton may not be installed

            before = self._fused_before
            options = {} if before is None else {"compiled": before.compiles_layers, "graphed": before.graphs_layers}
            self._undo += fuse(self.model, self.plan, self._observers, **options)
        elif self._fused_before is not None:
            self._undo += fuse_adapters(self.model)

    # ---- observe -------------------------------------------------------------------------------------------------

    def _observe(self) -> list[GateObserver | ExpertsObserver]:
        """Hook the gate of every block."""
        masks, handles = register_mask_hooks(self.model, [planned.block.place for planned in self.plan.blocks])
        with_up = self.config.importance == "utility"
        observers: list[GateObserver | ExpertsObserver] = []
        undo: list[Tap] = [*handles]
        for planned, window in zip(self.plan.blocks, self._window.gates, strict=True):
            block, mask = planned.block, masks[planned.block.place]
            kind = ExpertsObserver if block.experts else GateObserver
            observers.append(kind(block, planned.thresholds, window, mask, with_up, planned.engine.accumulate))
            undo += observers[-1].register()
        self._undo += [handle.remove for handle in undo]
        return observers

    def _refresh_parameters(self) -> None:
        """Update which adapters are active, which processes share them, and the hooks on their gradients."""
        parameters = self._window.parameters
        if not parameters.refresh():
            return
        checks.check_sharding(self.model, self.plan)
        if self._optimizer is not None:
            checks.check_parameters(self.model, self.plan, self._optimizer)
        self._ranks = self._wrapper_ranks or sharing_processes(self.plan.named_parameters())
        for window in self._window.gates:
            for projection in window.block.projections.values():
                for b in parameters.trained(projection.module):
                    if b.requires_grad and b not in self._watched_gradients:
                        self._watched_gradients.add(b)
                        self._undo.append(window.watch(b))

    def note_replay(self) -> None:
        """Count a pass that a CUDA graph has replayed: it updated the sums without running a Python hook."""
        self._window.count_replay()

    def settle(self) -> None:
        """Move the statistics to the adapters' current device and dtype, with the averages unchanged.

        For a model that is moved or cast after `attach`, as Accelerate does with FSDP2 when training starts.
        """
        if self._window.fits_adapters():
            return
        state = self.state_dict()
        plan = self.plan
        blocks = tuple(planned.block for planned in plan.blocks)
        found = Discovery(blocks, plan.refused, plan.others, plan.passed_over, rewrites=bool(plan.passed_over))
        self.plan = replace(make_plan(found, self.config, self._kernels), notice=plan.notice)
        self._window.start(self.plan.blocks)
        for planned, observer in zip(self.plan.blocks, self._observers, strict=True):
            observer.accumulate = planned.engine.accumulate
        # A model on the meta device has no averages yet.
        if not any(tensor.is_meta for tensor in state["tensors"].values()):
            self.load_state_dict(state)

    # ---- decide and apply ----------------------------------------------------------------------------------------

    def apply(self) -> None:
        """Decide for this optimizer step and, in gradient space, multiply the gradients; once per step.

        Call it after the last backward pass and before clipping. Without a call, the optimizer's step calls it.

        Raises:
            NALoRAError: a gate's adapter has a gradient although its gate was never observed.
        """
        window = self._window
        if window.decisions is not None:
            return
        self._refresh_parameters()
        checks.check_observed(window.gates)
        if not any(gate.passes for gate in window.gates):
            checks.check_layers(self.model, self.plan)
        window.decisions = [group.decide(self.config, self._ranks) for group in window.groups]
        if self.config.apply_to == "gradient":
            multiply = deepspeed.multiply_gradients if deepspeed.is_deepspeed(self._optimizer) else multiply_gradients
            multiply(self._controls())

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, **options: Any) -> Tensor:
        """Apply the control, then call `torch.nn.utils.clip_grad_norm_` for the optimizer's parameters.

        Raises:
            NALoRAError: DeepSpeed, which clips in its own step.
        """
        checks.check_clipping(self._optimizer)
        self.apply()
        assert self._optimizer is not None
        parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        return clip_grad_norm_(parameters, max_norm, norm_type, **options)

    def _controls(self) -> list[Control]:
        return self._window.parameters.controls(self._window.decisions or [], self.config.preserve_mean)

    # ---- around the optimizer ------------------------------------------------------------------------------------

    def bind(self, optimizer: Optimizer) -> None:
        """Act around the steps of this optimizer, in place of any other.

        Raises:
            NALoRAError: an optimizer that cannot be controlled, or one without the LoRA parameters.
        """
        optimizer = checks.usable_optimizer(optimizer)
        if deepspeed.is_deepspeed(optimizer):
            deepspeed.check_optimizer(optimizer, self.config)
        checks.check_trainable(self.plan)
        checks.check_parameters(self.model, self.plan, optimizer)
        if optimizer is self._optimizer:
            self._refresh_parameters()
            return
        self._unbind()
        self._refresh_parameters()
        self._window.change_optimizer()
        self._optimizer = optimizer
        self._window.gradients_elsewhere = deepspeed.is_deepspeed(optimizer)
        if self._window.gradients_elsewhere:
            undo = deepspeed.hook_steps(optimizer, self._enter_step, self._leave_step, self.open_window)
        else:
            undo = hook_steps(optimizer, self._enter_step, self._leave_step, self._gradients_zeroed)
        self._unhook_optimizer = undo
        cancelled = self.config.apply_to == "gradient" and "adam" in type(optimizer).__name__.lower()
        self.plan = replace(self.plan, notice=_ADAM_NOTICE if cancelled else "")

    def _unbind(self) -> None:
        for unhook in self._unhook_optimizer:
            unhook()
        self._unhook_optimizer = []
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
        """Discard the observations and decisions since the last step, as zeroing gradients does."""
        self._window.open()

    # ---- metrics and state ---------------------------------------------------------------------------------------

    def metrics(self, per_block: bool = False) -> dict[str, float]:
        """Return the state after the last step as floats for loggers: means over blocks, optionally also per block.

        Regime shares and the score a are means over the tokens of the last step. ``scale_*`` and ``mask_mean`` are the
        factors that multiply the steps: 1 for a block or projection without that control; `mask_acts` and
        `scaling_acts` are the share of blocks with that control. A value that the controller computes without applying
        it is named ``followed_scale_gate`` and so on. `stability` is the mean change of the mask in the last step;
        `skipped_updates` counts block updates that were skipped because z was not finite or there were no tokens.
        """
        preserve_mean = self.config.preserve_mean
        return measure(self._window.groups, self.plan.blocks, preserve_mean=preserve_mean, per_block=per_block)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs, by block name, with the version of its format."""
        return checkpoint.state_of(self._window.groups, self.config)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a saved state; nothing changes if it does not fit.

        Raises:
            NALoRAError: another version, other blocks, other widths.
        """
        checkpoint.restore(self._window.groups, self.config, state)
        self.open_window()

    def save(self, folder: str | Path) -> Path:
        """Write the state atomically as one safetensors file into `folder`, and return its path."""
        return checkpoint.save(self.state_dict(), Path(folder))

    def load(self, folder: str | Path) -> None:
        """Load the state that `save` wrote.

        Raises:
            NALoRAError: no file there, a damaged one, or one of another model or version.
        """
        self.load_state_dict(checkpoint.load(Path(folder)))

    def detach(self) -> None:
        """Remove every hook from the model and the optimizer; the adapters are not changed."""
        self._unbind()
        for undo in self._undo:
            undo()
        self._undo = []
        if self._fused_before is not None:
            self._fused_before.install()

    def on_detach(self, undo: Callable[[], None]) -> None:
        """Call `undo` when the controller is detached."""
        self._undo.append(undo)
