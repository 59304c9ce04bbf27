"""NA-LoRA's share of a training step for several numbers of layers, tokens and channels.

python benchmarks/growth.py [--rounds 3] [--steps 8]
"""

from __future__ import annotations

import argparse
import gc
from pathlib import Path

import harness
import torch
from llamas import SHAPES, build
from training import Training

CASES = [
    ("smollm2-135m", 30, 32, 320), ("smollm2-135m", 15, 32, 320), ("smollm2-135m", 30, 64, 320),
    ("llama-3.2-1b", 16, 4, 1024),
    ("llama-3.1-8b", 8, 4, 1024), ("llama-3.1-8b", 8, 1, 1024), ("llama-3.1-8b", 16, 4, 1024),
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rows", type=Path, default=harness.ROWS)
    args = parser.parse_args()
    for name, layers, batch, length in CASES:
        training = Training(build(SHAPES[name]._replace(layers=layers)), batch, length)
        variants = {
            "PEFT LoRA": training.plain,
            "NA-LoRA, model untouched": training.ours(),
            "PEFT LoRA, graph": training.graphed(training.plain),
            "NA-LoRA, model untouched, graph": training.graphed(training.ours()),
        }
        results = harness.interleave(variants, args.rounds, args.steps, 4)
        lora, ours, lora_graph, ours_graph = (results[variant]["p50"] for variant in variants)
        setting = f"{name} shapes, {layers} layers, {batch}x{length}"
        print(f"{setting:44s} LoRA {lora:7.2f} ms  NA-LoRA {ours / lora:.4f}, from graphs {lora_graph:7.2f} ms "
              f"{ours_graph / lora_graph:.4f}", flush=True)  # fmt: skip
        harness.append([{"question": "growth", "setting": setting, "variant": variant, "unit": "ms", **result}
                        for variant, result in results.items()], args.rows)  # fmt: skip
        del training, variants
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
