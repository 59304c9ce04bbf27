"""`transformers.Trainer` and every subclass of it, TRL's included.

Trainer builds its optimizer inside `train()`, clips before its callbacks hear of the step, and never tells a
callback where it resumes from. So the few methods that matter are followed on the instance itself: the user writes
no subclass, and subclasses keep their own overrides.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from transformers import Trainer, TrainerCallback

from nalora.config import Kernels, NALoRAConfig
from nalora.control.controller import NALoRAController
from nalora.control.hooks import wrap_method
from nalora.distributed.wrappers import flattens_parameters
from nalora.errors import NALoRAError

METRIC_PREFIX = "nalora/"


def attach_trainer(
    trainer: Trainer, config: NALoRAConfig | None = None, *, kernels: Kernels = "auto"
) -> NALoRAController:
    """Train the LoRA adapters of a Trainer's model nonlinearity-aware.

    Call it once, before `trainer.train()`. Control acts after gradient reduction and before clipping, the
    controller's metrics stand in the trainer's own logs as ``nalora/…``, its state in the trainer's checkpoints.
    Callbacks find it as ``trainer.nalora_controller``.

    The trainer's own arithmetic stays as it is. Of an encoder-decoder such as T5 that includes a loss that transformers
    multiplies by the passes of a step and by processes; ``accepts_loss_kwargs = False`` on the base model, before the
    trainer is built, makes it a mean (docs/behaviour.md).

    Args:
        trainer: a `transformers.Trainer` or any subclass, its model wrapped by PEFT.
        config: the settings; the paper's by default.
        kernels: how statistics are computed, see `nalora.attach`.

    Raises:
        NALoRAError: no Trainer, nothing to control, or a setup in which the control would be silently wrong.
    """
    _refuse_unless_trainer(trainer)
    _refuse_unusable(trainer)
    controller = NALoRAController(trainer.model, config, kernels=kernels)
    try:
        _Binding(trainer, controller).install()
    except NALoRAError:
        controller.detach()
        raise
    return controller


def _refuse_unless_trainer(trainer: Any) -> None:
    if not isinstance(trainer, Trainer):
        raise NALoRAError(
            f"attach_trainer({type(trainer).__name__})",
            found="a model" if isinstance(trainer, nn.Module) else f"a {type(trainer).__name__}",
            expected="a transformers.Trainer, or a subclass of it such as TRL's",
            fix="attach_trainer(trainer), or attach(model, optimizer) for a training loop of your own",
        )


def _refuse_unusable(trainer: Trainer) -> None:
    """Name what would leave the controller on parameters that nobody trains."""
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    stage = getattr(getattr(trainer.accelerator.state, "deepspeed_plugin", None), "zero_stage", None)
    optim = str(getattr(trainer.args.optim, "value", trainer.args.optim))
    refusals = (
        (
            trainer.is_deepspeed_enabled and stage not in (1, 2),
            f"a Trainer that runs DeepSpeed with ZeRO stage {stage}",
            "set zero_optimization.stage to 1 or 2, or launch with DDP or FSDP2",
        ),
        (
            trainer.is_deepspeed_enabled and trainer.args.gradient_accumulation_steps > 1,
            "a Trainer that runs DeepSpeed with gradient accumulation",
            "set gradient_accumulation_steps to 1, or launch with DDP or FSDP2",
        ),
        (
            flattens_parameters(trainer),
            "a Trainer that runs FSDP1, which flattens parameters and cuts them anywhere",
            "set fsdp_version: 2",
        ),
        (
            trainer.is_fsdp_enabled and isinstance(getattr(plugin, "cpu_offload", None), CPUOffloadPolicy),
            "a Trainer that runs FSDP with CPU offload",
            "launch without offloading: adapters are small",
        ),
        (
            trainer.args.n_gpu > 1,
            f"a Trainer that spreads one process over {trainer.args.n_gpu} GPUs (nn.DataParallel)",
            "launch with torchrun or accelerate launch, or show one GPU in CUDA_VISIBLE_DEVICES",
        ),
        (
            trainer.model_init is not None,
            "a Trainer with model_init, which builds another model when training starts",
            "build the model first and hand it over as Trainer(model=…)",
        ),
        (
            optim.endswith("lomo"),
            f"optim={optim!r}, which steps the parameters inside backward",
            "use an optimizer that steps after backward, such as optim='adamw_torch'",
        ),
    )
    for applies, found, fix in refusals:
        if applies:
            raise NALoRAError(
                f"attach_trainer({type(trainer).__name__})",
                found=found,
                expected="one model, stepped by one optimizer: one device, DDP, FSDP2, DeepSpeed's ZeRO-1 or 2",
                fix=fix,
            )


class _Binding(TrainerCallback):  # type: ignore[misc]
    """Follows a trainer's clipping, logging, saving and resuming with the controller's share of each."""

    def __init__(self, trainer: Trainer, controller: NALoRAController) -> None:
        self.trainer, self.controller = trainer, controller

    def install(self) -> None:
        """Follow the trainer until the controller is detached."""
        trainer = self.trainer
        for undo in (
            # Every way there: a subclass may clip in its own `_clip_grad_norm`, and without clipping Trainer still
            # asks the accelerator for the norm that it logs.
            wrap_method(trainer, "_clip_grad_norm", before=self._apply),
            wrap_method(trainer.accelerator, "clip_grad_norm_", before=self._apply),
            # FSDP2 shards there, on the device, before the trainer reads a checkpoint.
            wrap_method(trainer.accelerator, "prepare", after=self._settle),
            wrap_method(trainer, "log", before=self._add_metrics),
            wrap_method(trainer, "_save_optimizer_and_scheduler", after=self._save),
            wrap_method(trainer, "_load_optimizer_and_scheduler", after=self._resume),
            functools.partial(trainer.remove_callback, self),
            functools.partial(delattr, trainer, "nalora_controller"),
        ):
            self.controller.on_detach(undo)
        trainer.add_callback(self)
        trainer.nalora_controller = self.controller
        if trainer.optimizer is not None:
            self.controller.bind(trainer.optimizer)

    def on_train_begin(self, args: Any, state: Any, control: Any, *, optimizer: Any, **_: Any) -> None:
        """Bind to the optimizer that `train()` has built, with nothing left of a run that broke off."""
        self.controller.bind(optimizer)
        self.controller.open_window()

    def _settle(self, *prepared: Any, **_: Any) -> None:
        if any(isinstance(each, nn.Module) for each in prepared):
            self.controller.settle()

    def _apply(self, *_: Any, **__: Any) -> None:
        # DeepSpeed's engine has clipped and stepped inside backward; the control was there before it.
        if not self.trainer.is_deepspeed_enabled:
            self.controller.apply()

    def _add_metrics(self, logs: dict[str, float], *_: Any, **__: Any) -> None:
        # Only the training loss's own lines: evaluation and the closing summary say nothing about gates.
        if "loss" in logs:
            logs |= {METRIC_PREFIX + name: value for name, value in self.controller.metrics().items()}

    def _save(self, output_dir: str) -> None:
        if self.trainer.args.should_save:
            self.controller.save(output_dir)

    def _resume(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self.controller.load(checkpoint)
