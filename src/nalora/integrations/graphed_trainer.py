"""CUDA graphs for `transformers.Trainer`: the forward and backward passes of small models are captured and replayed.

A step of SmolLM2-135M is about 10,000 kernel launches, most of them shorter than the time Python needs to launch them.
Only the passes are replayed. Optimizer, clipping, logging, evaluation, checkpoints and the control of NA-LoRA stay the
Trainer's own, so they work as without graphs.

A replay repeats the kernels of the captured pass and runs no Python; `replayable.py` refuses the Trainers for which
that would be wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer, TrainerCallback

from nalora.control.tokens import IGNORED_LABEL
from nalora.errors import NALoRAError
from nalora.integrations.loss_filter import LossFilter
from nalora.integrations.replayable import refuse_setup
from nalora.kernels.cuda_graphs import GraphedStep
from nalora.models.attention import attends_without_mask, unmasked_attention

# Each captured shape takes seconds to capture, and memory for its inputs and gradients.
MOST_SHAPES = 16
_WARMUP = 2
_ITEMS = "num_items_in_batch"
# The name of an attention mask that attention does not need. Names are part of a graph's key, so batches with and
# without such a mask are captured separately.
_RIGHT_PADDED_MASK = "right_padded_mask"


def graph_trainer(
    trainer: Trainer, *, right_padded: bool = False, most_shapes: int | None = MOST_SHAPES, eager_first: int = 1
) -> Callable[[], None]:
    """Replay the passes of a Trainer from CUDA graphs; the function returned undoes it.

    Call it before `trainer.train()`; it needs no NA-LoRA. ``attach_trainer(trainer, cuda_graphs=True)`` calls it too.
    Every shape of a batch is captured separately, when it occurs for the second time. Pad batches to few shapes, with
    ``pad_to_multiple_of=64`` in the data collator for example; when `most_shapes` shapes have been captured, batches of
    other shapes run eagerly, which is logged once.

    A decoder with `sdpa` attention runs without an attention mask for batches that are padded on the right, where the
    result is the same and the kernels are faster. Batches with other padding keep their mask.

    Args:
        trainer: a `transformers.Trainer` on one CUDA device.
        right_padded: whether all batches are known to be padded on the right. Otherwise each batch is checked, for
            which the host waits for the device once a step.
        most_shapes: how many shapes are captured; None for all.
        eager_first: eager passes of every shape but the first. An eager pass needs memory in addition to the graphs'.

    Raises:
        NALoRAError: no Trainer, or one whose passes cannot be replayed.
    """
    if not isinstance(trainer, Trainer):
        raise NALoRAError(
            f"graph_trainer({type(trainer).__name__})",
            found=f"a {type(trainer).__name__}",
            expected="a transformers.Trainer",
            fix="graph_trainer(trainer), or nalora.kernels.cuda_graphs.GraphedStep for a training loop of your own",
        )
    refuse_setup(trainer)
    passes = _GraphedPasses(trainer, right_padded, most_shapes, eager_first)
    passes.install()
    return passes.remove


class _GraphedPasses(TrainerCallback):  # type: ignore[misc]
    """Replaces `training_step` of a trainer. The graphs exist during `train()` only, so that their memory is freed."""

    def __init__(self, trainer: Any, right_padded: bool, most_shapes: int | None, eager_first: int) -> None:
        self.trainer, self.right_padded = trainer, right_padded
        self.most_shapes, self.eager_first = most_shapes, eager_first
        self.plain: Callable[..., Tensor] = trainer.training_step
        self.was_own = "training_step" in vars(trainer)
        self.replaced: Callable[..., Tensor] | None = None
        self.may_drop_masks = False
        self.model: Any = None
        self.step: GraphedStep | None = None
        self.parameters: tuple[tuple[int, bool], ...] = ()
        self.loss_filter = LossFilter(trainer)

    def install(self) -> None:
        """Replace the trainer's `training_step`."""
        self.replaced = self.trainer.training_step = self.training_step
        self.trainer.add_callback(self)
        # Otherwise the host waits for the passes to end before it copies a batch, and prepares the next one after that.
        loading = self.trainer.accelerator.dataloader_config
        self.waited_for_copies, loading.non_blocking = not loading.non_blocking, True

    def remove(self) -> None:
        """Put the trainer's own `training_step` back, and free the graphs. A second call does nothing."""
        if self.replaced is None:
            return
        # If something else wraps `training_step` on top of this, its wrapper stays and calls the trainer's own.
        if vars(self.trainer).get("training_step") is self.replaced:
            if self.was_own:
                self.trainer.training_step = self.plain
            else:
                del self.trainer.training_step
        self.trainer.remove_callback(self)
        self.trainer.accelerator.dataloader_config.non_blocking = not self.waited_for_copies
        self.loss_filter.release()
        self.replaced = self.step = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Capture anew: the parameters may have moved since the last training. The setup may have changed too."""
        refuse_setup(self.trainer, own_functions=False)
        self.may_drop_masks = attends_without_mask(self.trainer.model)
        self.loss_filter.restart()
        self.step = None

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Let Trainer filter losses again."""
        self.loss_filter.release()

    on_substep_end = on_step_end

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Free the graphs and their memory."""
        self.step = None

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Compute the gradients of one batch and return its loss, as `Trainer.training_step` does."""
        trainer = self.trainer
        if self.replaced is None:
            return self.plain(model, inputs, num_items_in_batch)
        self._enter_training(model)
        batch = self._batch(inputs)
        if num_items_in_batch is not None:
            batch[_ITEMS] = torch.as_tensor(num_items_in_batch, device=trainer.args.device)
        step = self._current_step(model)
        loss = step(batch)
        if (controller := getattr(trainer, "nalora_controller", None)) is not None:
            controller.note_replay()
        return self.loss_filter.apply(loss)

    def _enter_training(self, model: Any) -> None:
        """Leave the evaluation mode of model and optimizer, which a replayed `training_step` does not do."""
        if not model.training:
            model.train()
        if callable(train := getattr(self.trainer.optimizer, "train", None)):  # schedule-free optimizers
            train()

    def _batch(self, inputs: Any) -> dict[str, Tensor]:
        """Return the tensors of a batch on the device; a mask that attention does not need gets another name."""
        batch = dict(self.trainer._prepare_inputs(inputs))
        for name, value in batch.items():
            if not isinstance(value, Tensor):
                raise NALoRAError(
                    f"cuda_graphs: batch entry {name!r}",
                    found=f"a {type(value).__name__}, which a captured pass would repeat for every batch",
                    expected="batches of tensors only",
                    fix=f"leave {name!r} out in the data collator",
                )
        # Position ids may separate packed examples, which transformers then does with a mask.
        if not self.may_drop_masks or "attention_mask" not in batch or "position_ids" in batch:
            return batch
        if self.right_padded or is_padded_on_right(batch["attention_mask"], batch.get("labels")):
            batch[_RIGHT_PADDED_MASK] = batch.pop("attention_mask")
        return batch

    def _current_step(self, model: Any) -> GraphedStep:
        """Return the graphs of the current parameters; new ones if parameters were moved, frozen or unfrozen."""
        parameters = [*self.trainer.model.parameters()]
        described = tuple((parameter.data_ptr(), parameter.requires_grad) for parameter in parameters)
        if self.step is None or described != self.parameters or model is not self.model:
            self.model, self.parameters = model, described
            self.step = None  # frees its graphs first
            self.step = GraphedStep(
                self._one_pass,
                warmup=_WARMUP,
                warm_later=self.eager_first,
                gradients_of=[parameter for parameter in parameters if parameter.requires_grad],
                most_shapes=self.most_shapes,
            )
        return self.step

    def _one_pass(self, batch: Mapping[str, Tensor]) -> Tensor:
        inputs = {name: tensor for name, tensor in batch.items() if name not in (_ITEMS, _RIGHT_PADDED_MASK)}
        if _RIGHT_PADDED_MASK not in batch:
            return self.plain(self.model, inputs, batch.get(_ITEMS))
        # The controller of NA-LoRA needs the mask to leave padding out of its statistics.
        inputs["attention_mask"] = batch[_RIGHT_PADDED_MASK]
        with unmasked_attention(self.trainer.model):
            return self.plain(self.model, inputs, batch.get(_ITEMS))


def is_padded_on_right(mask: Tensor, labels: Tensor | None) -> bool:
    """Return whether causal attention needs no mask for a batch; the host waits for the device.

    The real tokens of each row must come first, and padding must have no labels.
    """
    if mask.dim() != 2 or labels is None or labels.shape != mask.shape:
        return False
    real_first = (mask[:, 1:] <= mask[:, :-1]).all()
    unlabelled = ((labels == IGNORED_LABEL) | (mask != 0)).all()
    return bool(real_first & unlabelled)
