"""The `transformers.Trainer` of a run, and how its batch is split over processes and passes."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any, NamedTuple

from transformers import TrainerCallback

from nalora.distributed import processes
from nalora.errors import NALoRAError
from nalora.methods.optimizers import MUON, muon
from nalora.models.compatibility import best_device, default_dtype
from nalora.runs.settings import RunSettings
from nalora.training.cuda_graphs import graph_passes, refuse_unless_graphs_fit
from nalora.training.length_order import LikeLengths

_LIGER_WITHOUT_LOSS = {"fused_linear_cross_entropy": False, "cross_entropy": False}


class Split(NamedTuple):
    """An optimizer step's batch: `accumulated` passes of `micro` examples on each of `processes`."""

    micro: int
    accumulated: int
    processes: int

    def steps(self, examples: int, epochs: float) -> int:
        """How many optimizer steps the Trainer takes for so many examples."""
        passes = math.ceil(examples / (self.micro * self.processes))
        return math.ceil(math.ceil(passes / self.accumulated) * epochs)


class AsToldNow(TrainerCallback):  # type: ignore[misc]
    """A resumed run logs and saves as often as its settings say; a Trainer by itself as its checkpoint was told."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Put this training's intervals in place of those that came with the checkpoint."""
        state.compute_steps(args, state.max_steps)


def split_batch(settings: RunSettings) -> Split:
    """How the run's batch is split.

    Raises:
        NALoRAError: it cannot be.
    """
    count = processes.count()
    if settings.batch_size % count:
        fitting = [str(number) for number in range(1, settings.batch_size + 1) if settings.batch_size % number == 0]
        raise NALoRAError(
            f"batch_size: {settings.batch_size}",
            found=f"{count} processes",
            expected=f"a number of them that divides it: {', '.join(fitting)}",
            fix=f"launch so many, or set batch_size to a multiple of {count}",
        )
    micro = settings.micro_batch_size or settings.batch_size // count
    if settings.batch_size % (micro * count):
        raise NALoRAError(
            f"batch_size: {settings.batch_size}",
            found=f"{count} processes with micro_batch_size {micro}",
            expected="a multiple of their product",
            fix=f"set micro_batch_size to a divisor of {settings.batch_size // count}",
        )
    return Split(micro, settings.batch_size // (micro * count), count)


def make_trainer(settings: RunSettings, model: Any, dataset: Any, collator: Any, callbacks: list[Any]) -> Any:
    """A `transformers.Trainer` with the run's settings."""
    from transformers import TrainingArguments
    from transformers.trainer_callback import PrinterCallback

    from nalora.training.batch_split import RunTrainer

    split = split_batch(settings)
    _refuse_liger_that_cannot_run(settings)
    device = settings.device or best_device()
    dtype = settings.dtype or default_dtype(device)
    if settings.cuda_graphs:
        refuse_unless_graphs_fit(settings, device, dtype, split.accumulated, split.processes)
    steps = settings.steps or split.steps(len(dataset), settings.epochs)
    arguments = TrainingArguments(
        output_dir=str(Path(settings.output or "runs/run") / "checkpoints"),
        per_device_train_batch_size=split.micro,
        gradient_accumulation_steps=split.accumulated,
        learning_rate=settings.learning_rate,
        num_train_epochs=settings.epochs,
        max_steps=settings.steps or -1,
        lr_scheduler_type=settings.schedule,
        # For transformers a number below 1 is a share of the steps, and 1 is one step: here it is all of them.
        warmup_steps=steps if settings.warmup == 1 else settings.warmup,
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_norm,
        # Muon is given by itself below: no name of transformers' stands for it.
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
        # The Trainer would remove any folder named checkpoint-*, also one that it did not write; see save_times.
        save_total_limit=None,
        gradient_checkpointing=settings.gradient_checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False} if settings.gradient_checkpointing else None,
        use_liger_kernel=settings.liger,
        # Its losses ask the GPU how many labels count, which no graph can.
        liger_kernel_config=_LIGER_WITHOUT_LOSS if settings.cuda_graphs else None,
        report_to=settings.report_to,
        remove_unused_columns=False,
        disable_tqdm=True,
        dataloader_pin_memory=device.startswith("cuda"),
    )
    # One process trains on one GPU. The Trainer would spread the model over all it sees, and the batch with it.
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
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(AsToldNow())
    if settings.batches == "like-length":
        lengths = [len(dataset[i]["input_ids"]) for i in range(len(dataset))]
        order = LikeLengths(lengths, settings.batch_size, settings.seed)
        trainer._get_train_sampler = lambda *_: order
    if settings.cuda_graphs:
        graph_passes(trainer)
    return trainer


def _refuse_liger_that_cannot_run(settings: RunSettings) -> None:
    if not settings.liger:
        return
    device = settings.device or best_device()
    installed = importlib.util.find_spec("liger_kernel") is not None
    if not installed or not device.startswith("cuda"):
        raise NALoRAError(
            "liger: true",
            found=f"a run on {device}" if installed else "no liger-kernel",
            expected="Liger's kernels on a GPU",
            fix="leave liger out" if installed else "pip install liger-kernel, or leave liger out",
        )
