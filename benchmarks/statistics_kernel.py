"""Bandwidth of the statistics kernel relative to a copy, and the time of a decision with its control.

python benchmarks/statistics_kernel.py
"""

from __future__ import annotations

import argparse
from pathlib import Path

import harness
import torch
import triton

from nalora import activations
from nalora.config import NALoRAConfig
from nalora.control.apply import BlockFactors
from nalora.control.decision import BlockGroup
from nalora.kernels.statistics import Sums, triton_engine

SILU = activations.get("silu")
POINTS = (-1.278464543, 1.278464543)
QUANTILES = (0.2, 0.5, 0.8)


def microseconds(run) -> dict[str, float]:
    """Return the kernel time measured by events, with the cache cleared before every run."""
    p20, p50, p80 = triton.testing.do_bench(run, warmup=20, rep=200, quantiles=QUANTILES)
    return {"p20": round(1000 * p20, 2), "p50": round(1000 * p50, 2), "p80": round(1000 * p80, 2), "unit": "us"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, default=harness.ROWS)
    args = parser.parse_args()
    device = torch.device("cuda")
    rows = []
    for tokens in (4096, 8192, 16384):
        z = torch.randn(tokens, 14336, device=device, dtype=torch.bfloat16)
        y = torch.empty_like(z)
        mask = torch.rand(tokens, device=device) > 0.1
        sums = Sums.zeros(1, 14336, torch.float32, device).of_block(0)
        copy = microseconds(lambda z=z, y=y: y.copy_(z))
        runs = {
            "copy": copy,
            "statistics": microseconds(lambda z=z, s=sums: triton_engine.accumulate(s, z, SILU, POINTS)),
            "statistics, masked": microseconds(
                lambda z=z, s=sums, m=mask: triton_engine.accumulate(s, z, SILU, POINTS, None, m)
            ),
        }
        for name, result in runs.items():
            # A copy moves every byte twice.
            share = (1 if name == "copy" else 0.5) * copy["p50"] / result["p50"]
            print(f"{tokens:6d} tokens  {name:20s} {result['p50']:7.1f} us  {share:.3f} of the copy's bandwidth")
            rows.append(
                {"question": "statistics kernel", "setting": f"{tokens} x 14336 bf16", "variant": name, **result}
            )

    for name, blocks, width in (("smollm2-135m", 30, 1536), ("llama-3.1-8b", 32, 14336), ("llama-3.1-70b", 80, 28672)):
        group = BlockGroup([str(i) for i in range(blocks)], width, torch.float32, device)

        def decide(group=group) -> None:
            group.stacked.tokens.fill_(1)
            decision = group.decide(NALoRAConfig())
            BlockFactors.of(group, decision, preserve_mean=False)
            group.commit(decision, None)
            group.open_window()

        result = microseconds(decide)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            decide()
        on_device = microseconds(graph.replay)
        print(f"decision, {name:16s} {result['p50']:7.1f} us from Python, {on_device['p50']:7.1f} us on the GPU")
        setting = f"{name}: {blocks} blocks of {width}"
        rows += [{"question": "decision", "setting": setting, "variant": "from Python", **result},
                 {"question": "decision", "setting": setting, "variant": "on the GPU", **on_device}]  # fmt: skip
    harness.append([{"samples": 0, "peak_gib": 0, **row} for row in rows], args.rows)


if __name__ == "__main__":
    main()
