"""Speed-up of a small model in `transformers.Trainer`: eager PEFT against fused layers, Liger's layers and CUDA graphs.

python benchmarks/trainer_graphs.py [--batch 32] [--length 320] [--rounds 3] [--steps 12]

A step is everything between the starts of two steps of `Trainer.train()`, with Trainer's default settings: loading the
batch, passes, clipping, optimizer and schedule. Every round trains each variant for a few steps in turn. The first loss
of each variant is compared with PEFT's before anything is written.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from pathlib import Path
from typing import Any

import harness
import torch
from liger_kernel.transformers import apply_liger_kernel_to_llama
from llamas import SHAPES, build
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

import nalora
from nalora.integrations.graphed_trainer import graph_trainer
from nalora.training.accelerations import liger_contained

EAGER = "PEFT LoRA, eager"
# The largest relative difference of the first loss from PEFT's; losses of bf16 passes differ in their third digit.
TOLERANCE = 5e-3
# Eager steps, the capture, and the first replays.
UNTIMED = 6


class Clock(TrainerCallback):
    """Events on the device at the beginning of each step; nothing waits for them."""

    def __init__(self) -> None:
        self.events: list[torch.cuda.Event] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.events.append(torch.cuda.Event(enable_timing=True))
        self.events[-1].record()
        if len(self.events) == UNTIMED:
            torch.cuda.reset_peak_memory_stats()

    def milliseconds(self) -> list[float]:
        torch.cuda.synchronize()
        return [before.elapsed_time(after) for before, after in itertools.pairwise(self.events[UNTIMED:])]


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """One length, padded on the right as in a real data set."""
    ids = torch.stack([row["input_ids"] for row in rows])
    mask = torch.ones_like(ids)
    mask[::2, -ids.shape[1] // 8 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def run(
    variant: str, rows: list[dict[str, torch.Tensor]], args: argparse.Namespace
) -> tuple[list[float], float, float]:
    """Train one variant; return the milliseconds of its steps, its first loss and its peak memory in GiB."""
    torch.manual_seed(1)
    model = build(SHAPES["smollm2-135m"])
    base = model.get_base_model()
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder, liger_contained(base):
        if "Liger" in variant:
            apply_liger_kernel_to_llama(model=base, fused_linear_cross_entropy=False, cross_entropy=False)
        trainer = Trainer(
            model,
            TrainingArguments(
                folder,
                per_device_train_batch_size=args.batch,
                max_steps=UNTIMED + args.steps,
                learning_rate=1e-4,
                bf16=True,
                logging_steps=UNTIMED + args.steps,
                logging_first_step=True,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
            train_dataset=rows,
            data_collator=collate,
            callbacks=[clock],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.args._n_gpu = 1
        undo = VARIANTS[variant](trainer)
        trainer.train()
        undo()
    first = next(line["loss"] for line in trainer.state.log_history if "loss" in line)
    return clock.milliseconds(), first, torch.cuda.max_memory_allocated() / 2**30


def attached(**options: Any):
    return lambda trainer: nalora.attach_trainer(trainer, apply_to="update", **options).detach


VARIANTS = {
    EAGER: lambda trainer: lambda: None,
    "PEFT LoRA, graphs": graph_trainer,
    "NA-LoRA, eager": attached(),
    "NA-LoRA, fused layers, graphs": attached(kernels="fused", cuda_graphs=True),
    "NA-LoRA, fused layers, Liger's norms and rotary embedding, graphs": attached(kernels="fused", cuda_graphs=True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=320)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rows", type=Path, default=harness.ROWS)
    args = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    count = args.batch * (UNTIMED + args.steps)
    ids = torch.randint(0, SHAPES["smollm2-135m"].vocabulary, (count, args.length), generator=generator)
    rows = [{"input_ids": row} for row in ids]
    samples: dict[str, list[float]] = {name: [] for name in VARIANTS}
    losses: dict[str, float] = {}
    peaks: dict[str, float] = {}
    for _ in range(args.rounds):
        for name in VARIANTS:
            times, losses[name], peaks[name] = run(name, rows, args)
            samples[name] += times
            torch.cuda.empty_cache()
    wrong = {name: loss for name, loss in losses.items() if abs(loss / losses[EAGER] - 1) > TOLERANCE}
    if wrong:
        raise SystemExit(f"first losses differ from {losses[EAGER]} of {EAGER}: {wrong}")
    # What graphs keep between replays is in no tensor's memory, so that their peaks would be too low.
    peak = {name: "" if "graphs" in name else round(value, 3) for name, value in peaks.items()}
    results = {name: harness.quantiles(times) | {"peak_gib": peak[name]} for name, times in samples.items()}
    base = results[EAGER]["p50"]
    for name, result in results.items():
        print(f"{name:66s} {result['p50']:8.2f} ms  {base / result['p50']:6.2f} x faster  {result['peak_gib']} GiB")
    setting = f"smollm2-135m shapes, {args.batch}x{args.length}, transformers.Trainer"
    harness.append([{"question": "small model in Trainer", "setting": setting, "variant": name, "unit": "ms", **result}
                    for name, result in results.items()], args.rows)  # fmt: skip


if __name__ == "__main__":
    main()
