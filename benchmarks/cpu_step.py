"""How long is a training step of a real small model on a CPU, for LoRA and for NA-LoRA with either statistics engine?

OMP_WAIT_POLICY=PASSIVE python benchmarks/cpu_step.py [--batch 2] [--length 256] [--rounds 16] [--steps 1]

On an idle machine: other work on the cores shows as a wide p20 … p80. Ratios are taken within a round, between steps
seconds apart, since a shared CPU's speed drifts by more than the few percent in question. The rows of unit "ratio" are
those; of unit "ms", the steps themselves.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import harness
import peft
import torch

import nalora
from nalora.models import smollm2


class Setup:
    """SmolLM2-135M with LoRA on all linear layers and its optimizer; variants attach to it and detach again."""

    def __init__(self, batch: int, length: int) -> None:
        torch.manual_seed(0)
        base, _ = smollm2.load(torch.float32)
        base.config.use_cache = False
        self.model = peft.get_peft_model(base, peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
        self.model.train()
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-5)
        self.ids = torch.randint(0, base.config.vocab_size, (batch, length))
        self.controller: nalora.NALoRAController | None = None

    def step(self) -> None:
        self.model(input_ids=self.ids, labels=self.ids).loss.backward()
        clip = self.controller.clip_grad_norm_ if self.controller else self._clip
        clip(1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _clip(self, max_norm: float) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters, max_norm)

    @contextlib.contextmanager
    def plain(self) -> Iterator:
        yield self.step

    def ours(self, engine: str, kernels: str):
        @contextlib.contextmanager
        def attached() -> Iterator:
            self.controller = nalora.attach(self.model, self.optimizer, kernels=kernels)
            if self.controller.plan.statistics != engine:
                raise SystemExit(f"kernels={kernels!r} chose {self.controller.plan.statistics} here, not {engine}")
            yield self.step
            self.controller.detach()
            self.controller = None

        return attached


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--warmup", type=int, default=0)
    parser.add_argument("--rows", type=Path, default=harness.ROWS)
    args = parser.parse_args()
    warnings.filterwarnings("ignore", message="nalora: Adam")

    print("load before:", *(f"{each:.2f}" for each in os.getloadavg()))
    setup = Setup(args.batch, args.length)
    variants = {
        "PEFT LoRA": setup.plain,
        "NA-LoRA, reference engine": setup.ours("reference", "off"),
        "NA-LoRA, compiled engine": setup.ours("compiled", "auto"),
    }
    harness.interleave(variants, 1, 1, 0)  # compiles, and touches all memory once
    turns = [harness.interleave(variants, 1, args.steps, args.warmup) for _ in range(args.rounds)]
    setting = f"smollm2-135m float32, {torch.get_num_threads()} threads, {args.batch}x{args.length}"
    rows = []
    for name in variants:
        steps = harness.quantiles([turn[name]["p50"] for turn in turns])
        ratios = harness.quantiles([turn[name]["p50"] / turn["PEFT LoRA"]["p50"] for turn in turns])
        print(f"{name:28s} {steps['p50']:8.1f} ms  {ratios['p50']:6.4f}  [{ratios['p20']:.4f} … {ratios['p80']:.4f}]")
        for unit, result in (("ms", steps), ("ratio", ratios)):
            rows.append({"question": "cpu step", "setting": setting, "variant": name, "unit": unit, **result})
    harness.append(rows, args.rows)


if __name__ == "__main__":
    main()
