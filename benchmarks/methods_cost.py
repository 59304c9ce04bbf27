"""Costs of each method compared with LoRA: time of a step, time of its initialisation, peak memory.

python benchmarks/methods_cost.py [--shape smollm2-135m] [--batch 4] [--length 1024] [--steps 12] [--only NAME …]

The models are trained one after another in one process, each by a run's `transformers.Trainer`; LoRA is first and last,
which shows a drift of the machine's speed. `--only` must name lora too, to which the page compares the others.
`--device cpu --shape tiny --length 32` tries the methods without a GPU, where memory is not measured.
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
from typing import Any, NamedTuple

import harness
import torch
from llamas import SHAPES, base
from transformers import TrainerCallback

import nalora
from nalora import methods
from nalora.errors import NALoRAError
from nalora.methods.method import Adapter
from nalora.runs.inputs import RowDataset
from nalora.runs.settings import RunSettings
from nalora.training.batches import make_start
from nalora.training.trainer import make_trainer


class MethodVariant(NamedTuple):
    """A row's name, the method, its settings, and whether `nalora.fuse` computes its layers."""

    name: str
    method: str
    options: dict[str, Any]
    fused: bool = False


# PiSSA's exact decomposition of an 8B model takes an hour, so its authors' fast one is measured.
VARIANTS = [
    MethodVariant("lora", "lora", {}),
    MethodVariant("full", "full", {}),
    MethodVariant("rslora", "rslora", {}),
    MethodVariant("dora", "dora", {}),
    MethodVariant("pissa", "pissa", {"iterations": 16}),
    MethodVariant("lora+", "lora+", {}),
    MethodVariant("adalora", "adalora", {}),
    MethodVariant("lora-ga", "lora-ga", {}),
    MethodVariant("lora-pro", "lora-pro", {}),
    MethodVariant("lora-pro, full mode", "lora-pro", {"mode": "full"}),
    MethodVariant("gora", "gora", {"gradient_memory": 16.0}),
    MethodVariant("peft/gralora, k = 2", "peft/gralora", {"gralora_k": 2}),
    MethodVariant("peft/gralora, k = 4", "peft/gralora", {"gralora_k": 4}),
    MethodVariant("peft/gralora, k = 8", "peft/gralora", {"gralora_k": 8}),
    MethodVariant("block-lora, k = 2", "block-lora", {"blocks": 2}),
    MethodVariant("block-lora, k = 4", "block-lora", {"blocks": 4}),
    MethodVariant("block-lora, k = 8", "block-lora", {"blocks": 8}),
    MethodVariant("lora, fused layers", "lora", {}, fused=True),
    MethodVariant("block-lora, k = 8, fused layers", "block-lora", {"blocks": 8}, fused=True),
    MethodVariant("na-lora", "na-lora", {}),
    MethodVariant("na-lora, fused layers", "na-lora", {"kernels": "fused"}),
    MethodVariant("na-lora, update space", "na-lora", {"apply_to": "update"}),
    MethodVariant("lora, again", "lora", {}),
]


class StepTimes(TrainerCallback):
    """Records the milliseconds of every optimizer step, with the GPU synchronised."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        synchronise()
        self.began = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        synchronise()
        self.times.append(1000 * (time.perf_counter() - self.began))


def synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak_gib() -> float:
    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0


def reset_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def collate(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    ids = torch.stack(rows)
    return {"input_ids": ids, "labels": ids}


def measure(
    variant: MethodVariant, settings: RunSettings, shape: str, length: int, warmup: int, device: str = "cuda"
) -> dict[str, Any]:
    """Measure initialisation and steps of one method on a new model."""
    method = methods.get(variant.method).build(**variant.options)
    model = base(SHAPES[shape], device=device).train()
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, SHAPES[shape].vocabulary, (64 * settings.batch_size, length), generator=generator)
    dataset = RowDataset(list(tokens))
    passes: list[int] = []

    def progress(phase: str, done: int, total: int) -> None:
        if phase == "gradients":
            passes.append(total)

    with tempfile.TemporaryDirectory() as folder:
        settings = dataclasses.replace(settings, output=folder)
        start = make_start(settings, dataset, collate, torch.device(device), Path(folder), progress)
        synchronise()
        reset_peak()
        began = time.perf_counter()
        model = method.prepare(model, Adapter(), dataclasses.replace(start, cache=None))
        synchronise()
        started, start_gib = time.perf_counter() - began, peak_gib()
        if variant.fused:
            nalora.fuse(model)
        times = StepTimes()
        trainer = make_trainer(settings, model, dataset, collate, [times])
        trainer.optimizer = method.optimizer(trainer)
        method.attach(trainer)
        reset_peak()
        trainer.train()
    return {
        **harness.quantiles(times.times[warmup:]), "peak_gib": peak_gib(),
        "start_s": started, "start_gib": start_gib, "passes": passes[-1] if passes else 0,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="smollm2-135m")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--only", nargs="*", choices=[variant.name for variant in VARIANTS])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rows", type=Path, default=harness.ROWS)
    args = parser.parse_args()
    settings = RunSettings(
        "random", "random", steps=args.steps, batch_size=args.batch, learning_rate=1e-5, dtype="bfloat16",
        device=args.device, optimizer="adamw_torch_fused", log_every=1000,
    )  # fmt: skip
    setting = f"{args.shape} shapes, {args.batch}x{args.length}"
    for variant in VARIANTS:
        if args.only and variant.name not in args.only:
            continue
        try:
            result = attempt(partial(measure, variant, settings, args.shape, args.length, args.warmup, args.device))
        except NALoRAError as error:  # blocks that do not divide a tiny model's layers
            print(f"{variant.name:32s} not measured: {error}", flush=True)
            continue
        print(f"{variant.name:32s} {described(result)}", flush=True)
        harness.append(rows(result, {"question": "methods", "setting": setting, "variant": variant.name}), args.rows)


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
