"""Detection of divergence: a run whose numbers are not finite stops within a few steps, and saves no result."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from nalora.control.hooks import wrap_method
from nalora.distributed import processes
from nalora.distributed.shards import local, reshard

# Consecutive optimizer steps whose loss or gradient norm is not finite. A run can recover from one, not from three.
PATIENCE = 3
# Consecutive steps that a float16 scaler skipped. Each halves the scale, which starts at 2¹⁶: after this many, it is
# the model's own numbers that overflow, not the scaled gradients.
MOST_SKIPPED = 50


class DivergenceWatch(TrainerCallback):  # type: ignore[misc]
    """Checks loss and gradient norm of every optimizer step, and ends the training if they stay non-finite.

    The check runs on the device, and its result is read on the host one step later, while the device works on the next
    step: nothing waits. Every process reaches the same result at the same step.

    No checkpoint is written of a step whose loss, gradient norm or parameters are not finite, so that the last good one
    is neither replaced nor removed.

    Attributes:
        step: the first step of the divergence; None without one.
    """

    def __init__(self) -> None:
        self.step: int | None = None
        self.trainer: Any = None
        self._loss: Tensor | None = None
        self._norm: Tensor | float | None = None
        self._skipped = 0
        # Model, batch and label count of the last forward pass.
        self._pass: tuple[Any, Any, Any] | None = None
        # On the device: (number of consecutive non-finite steps, the first of them).
        self._streak: Tensor | None = None
        # The copy of it on the host, and when it is there.
        self._pending: tuple[Tensor, torch.cuda.Event | None] | None = None

    def install(self, trainer: Any) -> None:
        """Install on a trainer, after everything else that changes its `training_step`, to get the final loss."""
        self.trainer = trainer
        wrap_method(trainer, "training_step", before=self._take_pass, result=self._add_loss)
        wrap_method(trainer, "_get_grad_norm", result=self._take_norm)
        wrap_method(trainer, "_maybe_log_save_evaluate", before=self._cancel_save, after=self._reset_loss)
        trainer.add_callback(self)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """Check the step; stop if the run has diverged, as far as the host knows."""
        loss, norm = self._loss, self._norm
        self._loss = self._norm = None
        self._read()
        if self.trainer.accelerator.optimizer_step_was_skipped:
            self._skipped += 1
            if self._skipped == MOST_SKIPPED and self.step is None:
                self.step = state.global_step - MOST_SKIPPED + 1
        elif loss is not None:
            self._skipped = 0
            self._count(state.global_step, loss.detach(), norm)
        if self.step is not None:
            control.should_training_stop = control.should_log = True
        return control

    def conclude(self) -> int | None:
        """Return the step of a divergence after the last step, also of one that only a later step would show.

        Weights can be finite and still too large for a forward pass, so the last batch passes through the model once
        more, without gradients.
        """
        self._read()
        if self.step is None and not (finite_parameters(self.trainer.model) and self._finite_last_pass()):
            count, first = self._streak.tolist() if self._streak is not None else (0, 0)
            self.step = first if count else self.trainer.state.global_step
        return self.step

    def _take_pass(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> None:
        self._pass = (model, inputs, num_items_in_batch)

    @torch.no_grad()
    def _finite_last_pass(self) -> bool:
        """Return whether the loss of the last batch is finite with the final weights, on all processes.

        The model stays in training mode: it needs the kernels and the memory of the steps before.
        """
        if self._pass is None:  # no step was trained, on any process
            return True
        model, inputs, labels = self._pass
        self._pass = None
        with self.trainer.compute_loss_context_manager():
            loss = self.trainer.compute_loss(model, self.trainer._prepare_inputs(inputs), num_items_in_batch=labels)
        reshard(model)
        return not processes.any_process(not bool(torch.isfinite(loss).all()), loss.device)

    def _add_loss(self, loss: Tensor) -> None:
        self._loss = loss if self._loss is None else self._loss + loss

    def _take_norm(self, norm: Tensor | float | None) -> None:
        self._norm = norm

    @torch.no_grad()
    def _count(self, step: int, loss: Tensor, norm: Tensor | float | None) -> None:
        finite = torch.isfinite(loss).all()
        if norm is not None:
            finite = finite & torch.isfinite(local(torch.as_tensor(norm)).to(loss.device)).all()
        # The gradient norm is the same on every process; the losses differ.
        bad = processes.sum_over_processes((~finite).long()) > 0
        if self._streak is None:
            self._streak = torch.zeros(2, dtype=torch.long, device=loss.device)
        count, first = self._streak
        streak = torch.stack([torch.where(bad, count + 1, 0), torch.where(bad & (count == 0), step, first)])
        self._streak = streak
        if streak.device.type != "cuda":
            self._pending = (streak, None)
            self._read()
            return
        host = torch.empty(2, dtype=torch.long, pin_memory=True)
        host.copy_(streak, non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()
        self._pending = (host, arrived)

    def _read(self) -> None:
        if self._pending is None:
            return
        streak, arrived = self._pending
        self._pending = None
        if arrived is not None:
            arrived.synchronize()  # of the step before, while the device works on the next one
        count, first = streak.tolist()
        if count >= PATIENCE and self.step is None:
            self.step = first

    def _cancel_save(self, *_: Any, **__: Any) -> None:
        """Cancel a checkpoint if the last step or the parameters after it are not finite. Waits for the device."""
        control, streak = self.trainer.control, self._streak
        if control.should_save:
            finite = streak is None or not int(streak[0])
            control.should_save = finite and finite_parameters(self.trainer.model)

    def _reset_loss(self, *_: Any, **__: Any) -> None:
        """Set the logged loss sum to 0: the trainer subtracts it from itself, and NaN − NaN stays NaN in later rows."""
        trainer = self.trainer
        if trainer._globalstep_last_logged == trainer.state.global_step:
            trainer._tr_loss.zero_()


@torch.no_grad()
def finite_parameters(model: nn.Module) -> bool:
    """Return whether every trainable parameter is finite, on all processes."""
    parts = [local(parameter.detach()) for parameter in model.parameters() if parameter.requires_grad]
    device = parts[0].device if parts else torch.device("cpu")
    flags = [torch.isfinite(part).all().to(device) for part in parts if part.numel()]
    finite = not flags or bool(torch.stack(flags).all())
    return not processes.any_process(not finite, device)
