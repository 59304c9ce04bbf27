"""A run whose numbers are no longer finite: seen within a few steps, stopped, and nothing of it saved as a result."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from nalora.control.hooks import wrap_method
from nalora.distributed import processes
from nalora.distributed.shards import local, reshard

# Optimizer steps in a row whose loss or gradient norm is not finite. One such step can pass, three do not.
PATIENCE = 3
# Steps in a row that a float16 scaler skipped. Each halves the scale, which starts at 2¹⁶: after so many, a gradient
# that overflowed because of the scale has long fitted, so it is the model's own numbers that overflow.
MOST_SKIPPED = 50


class DivergenceWatch(TrainerCallback):  # type: ignore[misc]
    """Follows loss and gradient norm of every optimizer step, and ends the training where they stay non-finite.

    They are looked at on the device, and the verdict of a step is read on the host one step later, while the device
    works on the next: nothing waits. Every process comes to the same verdict at the same step.

    No checkpoint is written of a step whose loss, gradient norm or parameters are not finite, so that the last good one
    is neither replaced nor removed.

    Attributes:
        step: the first step of the divergence, None as long as there is none.
    """

    def __init__(self) -> None:
        self.step: int | None = None
        self.trainer: Any = None
        self._loss: Tensor | None = None
        self._norm: Tensor | float | None = None
        self._skipped = 0
        # Model, batch and label count of the last forward pass.
        self._pass: tuple[Any, Any, Any] | None = None
        # On the device: (how many steps in a row were not finite, the first of them).
        self._row: Tensor | None = None
        self._on_its_way: tuple[Tensor, torch.cuda.Event | None] | None = None

    def install(self, trainer: Any) -> None:
        """Follow a trainer; last of all that changes its `training_step`, so that the whole loss is seen."""
        self.trainer = trainer
        wrap_method(trainer, "training_step", before=self._take_pass, result=self._add_loss)
        wrap_method(trainer, "_get_grad_norm", result=self._take_norm)
        wrap_method(
            trainer, "_maybe_log_save_evaluate", before=self._save_only_what_is_finite, after=self._start_sum_anew
        )
        trainer.add_callback(self)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """Judge the step; stop if the one before was one too many."""
        if self._judged(state.global_step):
            control.should_training_stop = True
            control.should_log = True
        return control

    def conclude(self) -> int | None:
        """After the last step: the step of a divergence, also of one that only a later step would have shown.

        Weights can be finite and still too large for any forward pass, so the last batch is passed through the model
        once more, without gradients.
        """
        self._read()
        if self.step is None and not (finite_parameters(self.trainer.model) and self._finite_last_pass()):
            count, first = self._row.tolist() if self._row is not None else (0, 0)
            self.step = first if count else self.trainer.state.global_step
        return self.step

    def is_sound(self) -> bool:
        """Whether the step just done, and the parameters after it, are finite. Waits for the device."""
        row = self._row
        return (row is None or not int(row[0])) and finite_parameters(self.trainer.model)

    def _take_pass(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> None:
        self._pass = (model, inputs, num_items_in_batch)

    @torch.no_grad()
    def _finite_last_pass(self) -> bool:
        """Whether the loss of the last batch is finite with the weights after the last update, on all processes.

        The model stays in training mode: its kernels, and so its memory, are those of the steps before.
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

    def _judged(self, step: int) -> bool:
        """Whether the run has diverged, as far as the device has reported."""
        loss, norm = self._loss, self._norm
        self._loss = self._norm = None
        self._read()
        if self.trainer.accelerator.optimizer_step_was_skipped:
            self._skipped += 1
            if self._skipped == MOST_SKIPPED and self.step is None:
                self.step = step - MOST_SKIPPED + 1
        elif loss is not None:
            self._skipped = 0
            self._count(step, loss.detach(), norm)
        return self.step is not None

    @torch.no_grad()
    def _count(self, step: int, loss: Tensor, norm: Tensor | float | None) -> None:
        finite = torch.isfinite(loss).all()
        if norm is not None:
            finite = finite & torch.isfinite(local(torch.as_tensor(norm)).to(loss.device)).all()
        # The gradient norm is the same on every process, a loss is each one's own.
        bad = processes.sum_over_processes((~finite).long()) > 0
        if self._row is None:
            self._row = torch.zeros(2, dtype=torch.long, device=loss.device)
        count, first = self._row
        self._row = torch.stack([
            torch.where(bad, count + 1, 0), torch.where(bad & (count == 0), step, first),
        ])  # fmt: skip
        self._send(self._row)

    def _send(self, row: Tensor) -> None:
        """Start the verdict's way to the host."""
        if row.device.type != "cuda":
            self._on_its_way = (row, None)
            self._read()
            return
        host = torch.empty(2, dtype=torch.long, pin_memory=True)
        host.copy_(row, non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()
        self._on_its_way = (host, arrived)

    def _read(self) -> None:
        if self._on_its_way is None:
            return
        verdict, arrived = self._on_its_way
        self._on_its_way = None
        if arrived is not None:
            arrived.synchronize()  # of the step before: the device is busy with the next one meanwhile
        count, first = verdict.tolist()
        if count >= PATIENCE and self.step is None:
            self.step = first

    def _save_only_what_is_finite(self, *_: Any, **__: Any) -> None:
        control = self.trainer.control
        if control.should_save and not self.is_sound():
            control.should_save = False

    def _start_sum_anew(self, *_: Any, **__: Any) -> None:
        """The trainer subtracts what it has logged from itself, which leaves NaN of NaN for all later rows."""
        trainer = self.trainer
        if trainer._globalstep_last_logged == trainer.state.global_step:
            trainer._tr_loss.zero_()


@torch.no_grad()
def finite_parameters(model: nn.Module) -> bool:
    """Whether every trainable parameter is finite, on all processes."""
    trained = [local(parameter.detach()) for parameter in model.parameters() if parameter.requires_grad]
    flags = [torch.isfinite(part).all() for part in trained if part.numel()]
    device = flags[0].device if flags else torch.device("cpu")
    finite = bool(torch.stack([flag.to(device) for flag in flags]).all()) if flags else True
    return not processes.any_process(not finite, trained[0].device if trained else device)
