"""Losses of fifty bf16 training steps with fused layers and with PEFT's, from the same initial weights.

python benchmarks/loss_curves.py
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import torch
from llamas import Shape, build
from training import Training

CURVES = Path(__file__).parent / "loss_curves.csv"
SHAPE = Shape(1024, 4096, 12, 16, 4, 4096)
STEPS = 50


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--curves", type=Path, default=CURVES)
    args = parser.parse_args()
    curves = {}
    for name, kernels in (("PEFT's layers", "auto"), ("fused LoRA layers", "fused")):
        training = Training(build(SHAPE), 8, 256, lr=2e-3)
        draw = torch.Generator("cuda").manual_seed(5)
        with training.ours(kernels=kernels)():
            for _ in range(STEPS):
                # Rare and frequent tokens, and a second half that repeats the first: patterns of all difficulties.
                ids = (4096 * torch.rand(8, 128, device="cuda", generator=draw).pow(3)).long()
                training.batch = {"input_ids": torch.cat([ids, ids], dim=1)}
                training.step()
        curves[name] = [loss.item() for loss in training.losses]
    with args.curves.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", *curves])
        writer.writerows([step + 1, *(f"{each:.5f}" for each in losses)]
                         for step, losses in enumerate(zip(*curves.values(), strict=True)))  # fmt: skip
    plain = torch.tensor(curves["PEFT's layers"])
    for name, losses in curves.items():
        difference = (torch.tensor(losses) - plain).abs().max().item()
        print(f"{name:20s} {losses[0]:.4f} → {losses[-1]:.4f}, largest difference {difference:.4f}")


if __name__ == "__main__":
    main()
