"""Losses of two hundred bf16 steps at the shapes of Llama-3.1-8B: PEFT's layers, fused layers, and an FP8 base.

python benchmarks/loss_curves.py [--shape llama-3.1-8b] [--steps 200]

Every curve starts from the same random weights and trains on the same batches. PEFT's layers are trained twice: the
second curve shows how far two trainings drift apart by rounding alone, since attention's backward pass adds in no
fixed order.
"""

from __future__ import annotations

import argparse
import csv
import gc
from pathlib import Path
from typing import Any

import torch
from llamas import SHAPES, build
from training import Training

import nalora

CURVES = Path(__file__).parent / "loss_curves.csv"
PEFT = "PEFT's layers"
VARIANTS = {
    PEFT: None,
    "PEFT's layers, repeated": None,
    "fused layers": {"cuda_graphs": True},
    "fused layers, FP8 base": {"cuda_graphs": True, "base": "fp8"},
}
TOKENS, BATCH, LENGTH = 4096, 2, 256


def train(options: dict[str, Any] | None, shape: str, steps: int) -> list[float]:
    """Return the losses of one variant."""
    training = Training(build(SHAPES[shape]), BATCH, LENGTH, lr=1e-3)
    if options is not None:
        print(nalora.fuse(training.model, **options), flush=True)
    draw = torch.Generator("cuda").manual_seed(5)
    for _ in range(steps):
        # Rare and frequent tokens, and a second half that repeats the first: patterns of all difficulties.
        ids = (TOKENS * torch.rand(BATCH, LENGTH // 2, device="cuda", generator=draw).pow(3)).long()
        training.batch = {"input_ids": torch.cat([ids, ids], dim=1)}
        training.step()
    return torch.stack(training.losses).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="llama-3.1-8b")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--curves", type=Path, default=CURVES)
    args = parser.parse_args()
    curves = {}
    for name, options in VARIANTS.items():
        curves[name] = train(options, args.shape, args.steps)
        gc.collect()
        torch.cuda.empty_cache()
        difference = (torch.tensor(curves[name]) - torch.tensor(curves[PEFT])).abs().max().item()
        first, *_, last = curves[name]
        print(f"{name:26s} {first:.4f} → {last:.4f}, largest difference {difference:.4f}", flush=True)
    with args.curves.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", *curves])
        writer.writerows([step + 1, *(f"{each:.5f}" for each in losses)]
                         for step, losses in enumerate(zip(*curves.values(), strict=True)))  # fmt: skip


if __name__ == "__main__":
    main()
