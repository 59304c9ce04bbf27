"""The `transformers.Trainer` of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from nalora.methods.optimizers import MUON, muon
from nalora.models.compatibility import best_device, default_dtype
from nalora.runs.settings import RunSettings
from nalora.training.accelerations import refuse_unless_graphs_fit, refuse_unless_liger_runs
from nalora.training.batches import LikeLengths, split_batch, steps_of

_LIGER_WITHOUT_LOSS = {"fused_linear_cross_entropy": False, "cross_entropy": False}


class CurrentIntervals(TrainerCallback):  # type: ignore[misc]
    """Makes a resumed run log and save at the intervals of its settings, not at those in its checkpoint."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Replace the intervals that were loaded with the checkpoint."""
        state.compute_steps(args, state.max_steps)


def make_trainer(settings: RunSettings, model: Any, dataset: Any, collator: Any, callbacks: list[Any]) -> Any:
    """Return a `transformers.Trainer` with the run's settings."""
    from transformers import TrainingArguments
    from transformers.trainer_callback import PrinterCallback

    from nalora.integrations.graphed_trainer import graph_trainer
    from nalora.training.run_trainer import RunTrainer

    split = split_batch(settings)
    device = settings.device or best_device()
    if settings.liger:
        refuse_unless_liger_runs(device)
    dtype = settings.dtype or default_dtype(device)
    if settings.cuda_graphs:
        refuse_unless_graphs_fit(settings, device, dtype, split.accumulated, split.processes)
    steps = steps_of(settings, len(dataset))
    arguments = TrainingArguments(
        output_dir=str(Path(settings.output or "runs/run") / "checkpoints"),
        per_device_train_batch_size=split.micro,
        gradient_accumulation_steps=split.accumulated,
        learning_rate=settings.learning_rate,
        num_train_epochs=settings.epochs,
        max_steps=settings.steps or -1,
        # transformers has no schedule that rises exponentially; see RunTrainer.
        lr_scheduler_type="constant" if settings.schedule == "range_test" else settings.schedule,
        # In transformers a number below 1 is a share of the steps and 1 is one step; here 1 means all of them.
        warmup_steps=steps if settings.warmup == 1 else settings.warmup,
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_norm,
        # Muon, which transformers does not have, is passed to the Trainer below.
        optim="adamw_torch" if settings.optimizer == MUON else settings.optimizer,
        bf16=dtype == "bfloat16",
        fp16=dtype == "float16",
        use_cpu=device == "cpu",
        seed=settings.seed,
        data_seed=settings.seed,
        logging_steps=settings.log_every,
        logging_first_step=True,
        logging_nan_inf_filter=False,
        save_strategy="steps" if settings.save_every else "no",
        save_steps=settings.save_every or 500,
        # The Trainer would remove any folder named checkpoint-*, also one that it did not write; see checkpointing.
        save_total_limit=None,
        gradient_checkpointing=settings.gradient_checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False} if settings.gradient_checkpointing else None,
        use_liger_kernel=settings.liger,
        # Its losses copy the number of labels to the host, which a graph cannot do.
        liger_kernel_config=_LIGER_WITHOUT_LOSS if settings.cuda_graphs else None,
        report_to=settings.report_to,
        remove_unused_columns=False,
        disable_tqdm=True,
        dataloader_pin_memory=device.startswith("cuda"),
    )
    # One process trains on one GPU. The Trainer would use DataParallel on all visible ones, with a larger batch.
    arguments._n_gpu = min(arguments.n_gpu, 1)
    trainer = RunTrainer(
        model=model,
        args=arguments,
        train_dataset=dataset,
        data_collator=collator,
        callbacks=callbacks,
        optimizer_cls_and_kwargs=(
            muon(model.named_parameters(), settings.learning_rate) if settings.optimizer == MUON else None
        ),
    )
    trainer.range_test = settings.schedule == "range_test"
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(CurrentIntervals())
    if settings.batches == "like-length":
        order = LikeLengths(dataset.lengths, settings.batch_size, settings.seed)
        trainer._get_train_sampler = lambda *_: order
    if settings.cuda_graphs:
        # A run's collator pads on the right, to multiples of 64 tokens, so all its shapes are captured at once.
        graph_trainer(trainer, right_padded=True, most_shapes=None, eager_first=0)
    return trainer
