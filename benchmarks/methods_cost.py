"""Costs of each method compared with LoRA: time of a step, time of its initialisation, peak memory.

python benchmarks/methods_cost.py [--shape smollm2-135m] [--batch 4] [--length 1024] [--steps 12] [--only NAME …]

The models are trained one after another in one process, each by a run's `transformers.Trainer`; LoRA is first and last,
which shows a drift of the machine's speed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import harness
import torch
from llamas import SHAPES, base
from transformers import TrainerCallback

from nalora import methods
from nalora.methods.method import Adapter
from nalora.runs.inputs import RowDataset
from nalora.runs.settings import RunSettings
from nalora.training.batches import make_start
from nalora.training.trainer import make_trainer

# (name of the row, method, settings). PiSSA's exact decomposition of an 8B model takes an hour, so its authors' fast
# one is measured.
VARIANTS: list[tuple[str, str, dict[str, Any]]] = [
    ("lora", "lora", {}),
    ("full", "full", {}),
    ("rslora", "rslora", {}),
    ("dora", "dora", {}),
    ("pissa", "pissa", {"iterations": 16}),
    ("lora+", "lora+", {}),
    ("adalora", "adalora", {}),
    ("lora-ga", "lora-ga", {}),
    ("lora-pro", "lora-pro", {}),
    ("lora-pro, full mode", "lora-pro", {"mode": "full"}),
    ("gora", "gora", {"gradient_memory": 16.0}),
    ("na-lora", "na-lora", {}),
    ("na-lora, fused layers", "na-lora", {"kernels": "fused"}),
    ("na-lora, update space", "na-lora", {"apply_to": "update"}),
    ("lora, again", "lora", {}),
]


class StepTimes(TrainerCallback):
    """Records the milliseconds of every optimizer step, with the GPU synchronised."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        torch.cuda.synchronize()
        self.began = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        torch.cuda.synchronize()
        self.times.append(1000 * (time.perf_counter() - self.began))


def collate(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    ids = torch.stack(rows)
    return {"input_ids": ids, "labels": ids}


def measure(method: methods.Method, settings: RunSettings, shape: str, length: int, warmup: int) -> dict[str, Any]:
    """Measure initialisation and steps of one method on a new model."""
    model = base(SHAPES[shape]).train()
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, SHAPES[shape].vocabulary, (64 * settings.batch_size, length), generator=generator)
    dataset = RowDataset(list(tokens))
    passes: list[int] = []

    def progress(phase: str, done: int, total: int) -> None:
        if phase == "gradients":
            passes.append(total)

    with tempfile.TemporaryDirectory() as folder:
        settings = dataclasses.replace(settings, output=folder)
        start = make_start(settings, dataset, collate, torch.device("cuda"), Path(folder), progress)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        model = method.prepare(model, Adapter(), dataclasses.replace(start, cache=None))
        torch.cuda.synchronize()
        started = time.perf_counter() - began
        start_gib = torch.cuda.max_memory_allocated() / 2**30
        times = StepTimes()
        trainer = make_trainer(settings, model, dataset, collate, [times])
        trainer.optimizer = method.optimizer(trainer)
        method.attach(trainer)
        torch.cuda.reset_peak_memory_stats()
        trainer.train()
    return {
        **harness.quantiles(times.times[warmup:]), "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "start_s": started, "start_gib": start_gib, "passes": passes[-1] if passes else 0,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="smollm2-135m")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--rows", type=Path, default=harness.ROWS)
    args = parser.parse_args()
    settings = RunSettings(
        "random", "random", steps=args.steps, batch_size=args.batch, learning_rate=1e-5, dtype="bfloat16",
        device="cuda", optimizer="adamw_torch_fused", log_every=1000,
    )  # fmt: skip
    setting = f"{args.shape} shapes, {args.batch}x{args.length}"
    for row_name, name, options in VARIANTS:
        if args.only and row_name not in args.only:
            continue
        method = methods.get(name).build(**options)
        result = attempt(partial(measure, method, settings, args.shape, args.length, args.warmup))
        print(f"{row_name:24s} {described(result)}", flush=True)
        harness.append(rows(result, {"question": "methods", "setting": setting, "variant": row_name}), args.rows)


def described(result: dict[str, Any] | None) -> str:
    if result is None:
        return "out of memory"
    step = f"{result['p50']:8.1f} ms  {result['peak_gib']:6.2f} GiB"
    return f"{step}  start {result['start_s']:7.2f} s  {result['start_gib']:6.2f} GiB  {result['passes']} passes"


def rows(result: dict[str, Any] | None, common: dict[str, Any]) -> list[dict[str, Any]]:
    """Return rows for the step, the start and its passes; a method that ran out of memory has no samples."""
    if result is None:
        return [{**common, "unit": "ms", "samples": 0}]
    units = {"ms": [result[q] for q in ("p20", "p50", "p80")], "start s": [result["start_s"]] * 3,
             "start passes": [result["passes"]] * 3}  # fmt: skip
    peaks = {"ms": result["peak_gib"], "start s": result["start_gib"]}
    return [
        {**common, "unit": unit, "p20": round(low, 3), "p50": round(middle, 3), "p80": round(high, 3),
         "samples": result["samples"] if unit == "ms" else 1, "peak_gib": round(peaks.get(unit, 0.0), 3)}
        for unit, (low, middle, high) in units.items()
    ]  # fmt: skip


def attempt(measured: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
    """Return the result, None if the GPU ran out of memory; free its memory."""
    result = None
    with contextlib.suppress(torch.cuda.OutOfMemoryError):
        result = measured()
    gc.collect()
    torch.cuda.empty_cache()
    return result


if __name__ == "__main__":
    main()
