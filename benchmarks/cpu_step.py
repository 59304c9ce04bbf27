"""Time of a training step of a small model on a CPU, for LoRA and for NA-LoRA with either statistics engine.

OMP_WAIT_POLICY=PASSIVE python benchmarks/cpu_step.py [--batch 2] [--length 256] [--rounds 6] [--steps 2]

The speed of a shared CPU drifts by more than the few percent to be measured, so rows have three units. "ms" is the time
of a step. "ratio" compares a step with plain LoRA's of the same round, seconds apart. "share" is the fraction of a step
spent in nalora's own hooks: on a CPU nothing runs asynchronously, so this is the overhead except for effects on caches.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import harness
import peft
import torch

import nalora
from nalora.control.observer import GateObserver
from nalora.models.loading import ModelSpec, load


class Clock:
    """Sums the milliseconds spent in nalora while a variant is attached."""

    WATCHED = (
        (GateObserver, "receive"),
        (nalora.NALoRAController, "apply"),
        (nalora.NALoRAController, "_leave_step"),
    )

    def __init__(self) -> None:
        self.spent = 0.0

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        originals = [(owner, name, getattr(owner, name)) for owner, name in self.WATCHED]
        for owner, name, original in originals:
            setattr(owner, name, self._timed(original))
        try:
            yield
        finally:
            for owner, name, original in originals:
                setattr(owner, name, original)

    def _timed(self, function):
        @functools.wraps(function)
        def timed(*args, **options):
            start = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                self.spent += 1000 * (time.perf_counter() - start)

        return timed


class Setup:
    """SmolLM2-135M with LoRA on all linear layers and its optimizer; variants attach to it and detach again."""

    def __init__(self, batch: int, length: int) -> None:
        torch.manual_seed(0)
        base = load(ModelSpec("smollm2-135m", dtype="float32", device="cpu")).model
        base.config.use_cache = False
        self.model = peft.get_peft_model(base, peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
        self.model.train()
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-5)
        self.ids = torch.randint(0, base.config.vocab_size, (batch, length))
        self.controller: nalora.NALoRAController | None = None
        self.clock = Clock()
        self.shares: dict[str, list[float]] = {}

    def step(self) -> None:
        start, self.clock.spent = time.perf_counter(), 0.0
        self._train()
        if self.controller:
            taken = 1000 * (time.perf_counter() - start)
            self.shares.setdefault(self.controller.plan.statistics, []).append(self.clock.spent / taken)

    def _train(self) -> None:
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
            with self.clock.running():
                yield self.step
            self.controller.detach()
            self.controller = None

        return attached


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--rows", type=Path, default=harness.ROWS)
    args = parser.parse_args()
    warnings.filterwarnings("ignore", message="nalora: Adam")

    print("load before:", *(f"{load:.2f}" for load in os.getloadavg()))
    setup = Setup(args.batch, args.length)
    engines = {"NA-LoRA, reference engine": "reference", "NA-LoRA, compiled engine": "compiled"}
    variants = {
        "PEFT LoRA": setup.plain,
        "NA-LoRA, reference engine": setup.ours("reference", "off"),
        "NA-LoRA, compiled engine": setup.ours("compiled", "auto"),
    }
    harness.interleave(variants, 1, 1, 0)  # compiles, and touches all memory once
    setup.shares.clear()
    # Every other round in reverse order: a drift within a round would slow the last variant, once by 2 %.
    orders = (variants, dict(reversed(variants.items())))
    turns = [harness.interleave(orders[n % 2], 1, args.steps, args.warmup) for n in range(args.rounds)]
    setting = f"smollm2-135m float32, {torch.get_num_threads()} threads, {args.batch}x{args.length}"
    rows = []
    for name in variants:
        units = {
            "ms": harness.quantiles([turn[name]["p50"] for turn in turns]),
            "ratio": harness.quantiles([turn[name]["p50"] / turn["PEFT LoRA"]["p50"] for turn in turns]),
        }
        if name in engines:
            units["share"] = harness.quantiles(setup.shares[engines[name]])
        texts = (f"{u} {r['p50']:.5g} [{r['p20']:.5g} … {r['p80']:.5g}]" for u, r in units.items())
        print(f"{name:28s}", "   ".join(texts))
        for unit, result in units.items():
            rows.append({"question": "cpu step", "setting": setting, "variant": name, "unit": unit, **result})
    harness.append(rows, args.rows)
    print("load after:", *(f"{load:.2f}" for load in os.getloadavg()))


if __name__ == "__main__":
    main()
