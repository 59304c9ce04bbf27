"""`transformers.Trainer` and every subclass of it, TRL's included.

Trainer builds its optimizer inside `train()`, clips before its callbacks hear of the step, and never tells a
callback where it resumes from. So the few methods that matter are followed on the instance itself: the user writes
no subclass, and subclasses keep their own overrides.
"""

from __future__ import annotations

import functools
from typing import Any

from transformers import Trainer, TrainerCallback

from nalora.config import NALoRAConfig
from nalora.controller import Kernels, NALoRAController
from nalora.errors import NALoRAError
from nalora.following import follow

METRIC_PREFIX = "nalora/"


def attach_trainer(
    trainer: Trainer, config: NALoRAConfig | None = None, *, kernels: Kernels = "auto"
) -> NALoRAController:
    """Train the LoRA adapters of a Trainer's model nonlinearity-aware.

    Call it once, before `trainer.train()`. Control acts after gradient reduction and before clipping, the
    controller's metrics stand in the trainer's own logs as ``nalora/…``, its state in the trainer's checkpoints.

    Args:
        trainer: a `transformers.Trainer` or any subclass, its model wrapped by PEFT.
        config: the settings; the paper's by default.
        kernels: how statistics are computed, see `nalora.attach`.

    Raises:
        NALoRAError: nothing to control, or a setup in which the control would be silently wrong.
    """
    if trainer.is_deepspeed_enabled:
        raise NALoRAError(
            "attach_trainer",
            found="a Trainer that runs DeepSpeed, which steps inside backward and keeps its own parameters",
            expected="one device or DDP",
            fix="launch without a DeepSpeed configuration",
        )
    controller = NALoRAController(trainer.model, config, kernels=kernels)
    _Binding(trainer, controller).install()
    return controller


class _Binding(TrainerCallback):  # type: ignore[misc]
    """Follows a trainer's clipping, logging, saving and resuming with the controller's share of each."""

    def __init__(self, trainer: Trainer, controller: NALoRAController) -> None:
        self.trainer, self.controller = trainer, controller

    def install(self) -> None:
        """Follow the trainer until the controller is detached."""
        trainer = self.trainer
        for undo in (
            follow(trainer.accelerator, "clip_grad_norm_", before=self._apply),
            follow(trainer, "log", before=self._add_metrics),
            follow(trainer, "_save_optimizer_and_scheduler", after=self._save),
            follow(trainer, "_load_optimizer_and_scheduler", after=self._resume),
            functools.partial(trainer.remove_callback, self),
        ):
            self.controller.on_detach(undo)
        trainer.add_callback(self)
        if trainer.optimizer is not None:
            self.controller.bind(trainer.optimizer)

    def on_train_begin(self, args: Any, state: Any, control: Any, *, optimizer: Any, **_: Any) -> None:
        """Bind to the optimizer that `train()` has built."""
        self.controller.bind(optimizer)

    def _apply(self, *_: Any, **__: Any) -> None:
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
