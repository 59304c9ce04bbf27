"""`transformers.Trainer` and its subclasses, including those of TRL.

Trainer builds its optimizer inside `train()`, clips before it calls its callbacks, and does not pass them the path of
the checkpoint to resume from. So the methods involved are wrapped on the instance: users need no subclass, and
subclasses keep their own overrides.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from transformers import Trainer, TrainerCallback
from typing_extensions import Unpack

from nalora.config import Kernels, NALoRAConfig, Settings, config_of
from nalora.control.controller import NALoRAController
from nalora.control.hooks import wrap_method
from nalora.distributed.wrappers import flattens_parameters
from nalora.errors import NALoRAError, refuse_first
from nalora.integrations.graphed_trainer import graph_trainer
from nalora.models.versions import require_fsdp2_resume

METRIC_PREFIX = "nalora/"


def attach_trainer(
    trainer: Trainer,
    config: NALoRAConfig | None = None,
    *,
    kernels: Kernels = "auto",
    cuda_graphs: bool = False,
    **settings: Unpack[Settings],
) -> NALoRAController:
    """Train the LoRA adapters of a Trainer's model with NA-LoRA.

    Call it once, before `trainer.train()`. The control acts after gradient reduction and before clipping; the trainer's
    logs include the controller's metrics as ``nalora/…``, and its checkpoints the controller's state. Callbacks can
    access the controller as ``trainer.nalora_controller``.

    The trainer's own arithmetic does not change. For an encoder-decoder such as T5 this includes that transformers
    multiplies the loss by the passes of a step and by processes; ``accepts_loss_kwargs = False`` on the base model,
    before the trainer is built, makes it a mean (docs/behaviour.md).

    Args:
        trainer: a `transformers.Trainer` or any subclass, with a PEFT model.
        config: the settings; by default the paper's.
        kernels: how statistics are computed, see `nalora.attach`.
        cuda_graphs: whether forward and backward passes are replayed from CUDA graphs, for small models on a GPU, whose
            steps otherwise wait for Python (see `nalora.integrations.graphed_trainer.graph_trainer`).
        **settings: fields of `NALoRAConfig`, such as ``apply_to="update"``, in place of `config`.

    Raises:
        NALoRAError: no Trainer, a model without anything to control, or a setup in which the control would be wrong.
    """
    _check_trainer(trainer)
    controller = NALoRAController(trainer.model, config_of("attach_trainer", config, settings), kernels=kernels)
    try:
        _Binding(trainer, controller).install()
        if cuda_graphs:
            controller.on_detach(graph_trainer(trainer))
    except NALoRAError:
        controller.detach()
        raise
    return controller


def attach_with_plan(trainer: Trainer, settings: Mapping[str, Any]) -> NALoRAController:
    """Attach with settings as in a file, `kernels` included, and print the plan once for all processes."""
    config = NALoRAConfig().changed({name: value for name, value in settings.items() if name != "kernels"})
    controller = attach_trainer(trainer, config, kernels=settings.get("kernels", "auto"))
    if trainer.is_world_process_zero():
        print(f"nalora: NA-LoRA is attached to {type(trainer).__name__}\n{controller.plan}", flush=True)
    return controller


def _check_trainer(trainer: Any) -> None:
    """Refuse what is no Trainer, and one for which the controller would act on parameters that are not trained."""
    if not isinstance(trainer, Trainer):
        raise NALoRAError(
            f"attach_trainer({type(trainer).__name__})",
            found="a model" if isinstance(trainer, nn.Module) else f"a {type(trainer).__name__}",
            expected="a transformers.Trainer, or a subclass of it such as TRL's",
            fix="attach_trainer(trainer), or attach(model, optimizer) for a training loop of your own",
        )
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    stage = getattr(getattr(trainer.accelerator.state, "deepspeed_plugin", None), "zero_stage", None)
    optim = str(getattr(trainer.args.optim, "value", trainer.args.optim))
    problems = (
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
            "a Trainer that runs FSDP1, which flattens parameters and shards them at any element",
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
            "launch with torchrun or accelerate launch, or set CUDA_VISIBLE_DEVICES to one GPU",
        ),
        (
            trainer.model_init is not None,
            "a Trainer with model_init, which builds another model when training starts",
            "build the model first and pass it as Trainer(model=…)",
        ),
        (
            optim.endswith("lomo"),
            f"optim={optim!r}, which steps the parameters inside backward",
            "use an optimizer that steps after backward, such as optim='adamw_torch'",
        ),
    )
    expected = "one model, stepped by one optimizer: one device, DDP, FSDP2, DeepSpeed's ZeRO-1 or 2"
    refuse_first(f"attach_trainer({type(trainer).__name__})", expected, problems)


class _Binding(TrainerCallback):  # type: ignore[misc]
    """Calls the controller when a trainer clips, logs, saves and resumes."""

    def __init__(self, trainer: Trainer, controller: NALoRAController) -> None:
        self.trainer, self.controller = trainer, controller

    def install(self) -> None:
        """Wrap the trainer's methods until the controller is detached."""
        trainer = self.trainer
        for undo in (
            # All three, and the control acts at the first: a subclass may clip in its own `_clip_grad_norm` or call
            # the accelerator itself, and with max_grad_norm=0 Trainer only computes the norm that it logs. A trainer
            # that does none of them is controlled when its optimizer steps.
            wrap_method(trainer, "_clip_grad_norm", before=self._apply),
            wrap_method(trainer, "_get_grad_norm", before=self._apply),
            wrap_method(trainer.accelerator, "clip_grad_norm_", before=self._apply),
            # FSDP2 shards here, on the device, before the trainer loads a checkpoint.
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
        """Bind to the optimizer that `train()` has built, and discard the observations of an interrupted run."""
        self.controller.bind(optimizer)
        self.controller.open_window()

    def _settle(self, *prepared: Any, **_: Any) -> None:
        if any(isinstance(value, nn.Module) for value in prepared):
            self.controller.settle()

    def _apply(self, *_: Any, **__: Any) -> None:
        # DeepSpeed's engine has clipped and stepped inside backward, where the control has acted before it.
        if not self.trainer.is_deepspeed_enabled:
            self.controller.apply()

    def _add_metrics(self, logs: dict[str, float], *_: Any, **__: Any) -> None:
        # Only logs of the training loss: evaluation and the final summary have no gate statistics.
        if "loss" in logs:
            logs |= {METRIC_PREFIX + name: value for name, value in self.controller.metrics().items()}

    def _save(self, output_dir: str) -> None:
        if self.trainer.args.should_save:
            self.controller.save(output_dir)

    def _resume(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            if self.trainer.is_fsdp_enabled:
                require_fsdp2_resume(checkpoint)
            self.controller.load(checkpoint)
