"""A Trainer whose training does not depend on how its batch is split over passes and processes.

The loss of an optimizer step is the mean over all its label tokens. A pass contributes (its tokens / the step's tokens)
× its own mean. Most decoders compute that themselves: given `num_items_in_batch`, they divide the sum of their tokens'
losses by it. T5, BART and similar models accept the argument, as they accept any, and return the mean of their pass all
the same; summed over passes that would be too large by their number.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from typing import Any

import torch
from accelerate.data_loader import BatchSamplerShard
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import Trainer
from transformers.trainer_utils import unwrap_peft_model

from nalora.control.tokens import IGNORED_LABEL
from nalora.integrations.replayable import replayable
from nalora.models.versions import counts_first_labels, require_fsdp2_resume
from nalora.training.batches import FilledBatches

# A range test tries learning rates over three orders of magnitude.
_RANGE = 1000.0


class RunTrainer(Trainer):  # type: ignore[misc]
    """A Trainer whose loss is the mean over the label tokens of a step, and whose processes share each epoch evenly.

    Attributes:
        weights_passes: whether the mean of each pass is weighted here, because the model does not divide its loss.
        range_test: whether the learning rate rises exponentially to its value, over all steps.
    """

    range_test = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        inner = unwrap_peft_model(self.accelerator.unwrap_model(self.model))
        self.weights_passes = not divides_by_items(inner)
        self._leaves_first_labels = counts_first_labels(inner)
        # In both cases the labels of a step are counted, and the losses of its passes add up to the step's.
        self.model_accepts_loss_kwargs = True

    @replayable
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Tensor | int | None = None
    ) -> Any:
        """Return a pass's share of the loss of its step, times the number of processes, over which DDP averages."""
        if not self.weights_passes or num_items_in_batch is None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        outputs = model(**inputs)
        shifted = self._leaves_first_labels or getattr(self, "_loss_shifts_labels", False)
        labels = inputs["labels"][..., 1:] if shifted else inputs["labels"]
        loss = share_of_step(outputs["loss"], labels, num_items_in_batch) * self.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Return transformers' scheduler, or that of a learning-rate range test."""
        if self.range_test:
            rises = functools.partial(range_test_factor, steps=num_training_steps)
            self.lr_scheduler = LambdaLR(optimizer or self.optimizer, rises)
            return self.lr_scheduler
        return super().create_scheduler(num_training_steps, optimizer)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Any:
        """Count the labels of a step that its loss counts."""
        if self._leaves_first_labels:
            batch_samples = [{**batch, "labels": batch["labels"][..., 1:]} for batch in batch_samples]
        return super()._get_num_items_in_batch(batch_samples, device)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load a checkpoint. Raises NALoRAError if Accelerate would load other adapters than were saved."""
        if self.is_fsdp_enabled:
            require_fsdp2_resume(resume_from_checkpoint)
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    def get_train_dataloader(self) -> Any:
        """Return Accelerate's loader, with `FilledBatches` if the collator accepts None."""
        loader = super().get_train_dataloader()
        shard = loader.batch_sampler
        if isinstance(shard, BatchSamplerShard) and getattr(self.data_collator, "accepts_none", False):
            shard.batch_sampler = FilledBatches(shard.batch_sampler, shard.num_processes)
            # A resumed epoch sets its number on this attribute; Accelerate sets only its own sampler here.
            shard.sampler = shard.batch_sampler.sampler
        return loader


def range_test_factor(step: int, steps: int) -> float:
    """Return the factor on the learning rate of a step, counted from 0: it rises from a thousandth to 1 in the last."""
    return float(_RANGE ** (min(step + 1, steps) / steps - 1))


def divides_by_items(model: nn.Module) -> bool:
    """Return whether the model's own loss is its sum over `num_items_in_batch`, by the source of its forward pass.

    False if the source cannot be read: weighting the mean is correct for every model.
    """
    if (declared := getattr(model, "accepts_loss_kwargs", None)) is not None:
        return bool(declared)
    try:
        source = inspect.getsource(inspect.unwrap(model.forward))
        tree = ast.parse(textwrap.dedent(source))
    except (OSError, TypeError, SyntaxError):
        return False
    return any(isinstance(node, ast.Call) and _forwards_items(node) for node in ast.walk(tree))


def _forwards_items(call: ast.Call) -> bool:
    """Return whether a call is `self.loss_function(…, **kwargs)`, or has the argument `num_items_in_batch`."""
    names = {keyword.arg for keyword in call.keywords}  # None for **kwargs
    is_loss = isinstance(call.func, ast.Attribute) and call.func.attr == "loss_function"
    return "num_items_in_batch" in names or (is_loss and None in names)


def share_of_step(mean: Tensor, labels: Tensor, items: Tensor | int) -> Tensor:
    """Return what a pass with this mean loss contributes to the mean over the `items` labels of its step.

    A pass without labels contributes 0, where its own mean is 0/0. Nothing here waits for the device.
    """
    own = (labels != IGNORED_LABEL).sum()
    return torch.where(own > 0, mean, 0) * (own.to(mean.dtype) / items)
