"""How the batches of a pass are dealt to processes, so that all of them together learn what one process learns.

Accelerate deals them in turn, and where they do not come out even it hands the first examples of the pass out again:
they would be learnt twice, and the last step of every pass would be another one than on one process. Here blanks fill
the places instead: rows without a token that counts, which neither the loss nor a gate's statistics see.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import BatchSampler
from transformers import Trainer
from transformers.trainer_utils import unwrap_peft_model

from nalora.training.token_mean import divides_by_items, share_of_step

# Where a batch has no example left.
BLANK: None = None


class Filled(BatchSampler):
    """Another sampler's batches, the last ones filled with blanks until every process has a whole one."""

    def __init__(self, batches: BatchSampler, processes: int) -> None:
        super().__init__(batches.sampler, batches.batch_size, drop_last=False)
        self.batches, self.processes = batches, processes

    def __len__(self) -> int:
        return math.ceil(len(self.batches) / self.processes) * self.processes

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            yield [*batch, *[BLANK] * (self.batch_size - len(batch))]
        for _ in range(len(self) - len(self.batches)):
            yield [BLANK] * self.batch_size


class RunTrainer(Trainer):  # type: ignore[misc]
    """A Trainer whose processes share each pass over the data without a remainder.

    Its loss is the mean over the label tokens of the whole step for every model.

    Attributes:
        weights_passes: whether the mean of each pass is weighted here, since the model does not divide its loss itself.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        inner = unwrap_peft_model(self.accelerator.unwrap_model(self.model))
        self.weights_passes = not divides_by_items(inner)
        # Either way a step's labels are to be counted, and its passes' losses add up to the step's.
        self.model_accepts_loss_kwargs = True

    def compute_loss(
        self,
        model: Any,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """The share that a pass has in the loss of its step, times the processes that DDP takes the mean over."""
        if not self.weights_passes or num_items_in_batch is None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        outputs = model(**inputs)
        labels = inputs["labels"][..., 1:] if getattr(self, "_loss_shifts_labels", False) else inputs["labels"]
        loss = share_of_step(outputs["loss"], labels, num_items_in_batch) * self.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss

    def get_train_dataloader(self) -> Any:
        """Accelerate's, with blanks where the collator can make them."""
        loader = super().get_train_dataloader()
        dealt = loader.batch_sampler
        if isinstance(dealt, BatchSamplerShard) and getattr(self.data_collator, "takes_blanks", False):
            dealt.batch_sampler = Filled(dealt.batch_sampler, dealt.num_processes)
            # A resumed pass looks here for who has to know its number; Accelerate puts only its own sampler there.
            dealt.sampler = dealt.batch_sampler.sampler
        return loader
